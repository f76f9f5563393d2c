//! The parts of a payload: which travel inline, and the received ones.

use super::{BULK_BIT, pad8, read_u64};
use crate::limits::{BULK_MIN, MAX_INLINE};

/// The payload of a CALL or REPLY: part lengths and the bytes of the inline parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts<'a> {
    /// 8 bytes each.
    pub(super) lens: &'a [u8],
    pub(super) inline: &'a [u8],
    pub(super) bulk: u64,
    pub(super) total: u64,
}

/// One part of a received payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<'a> {
    pub len: u64,
    /// None: it comes in bulk sections.
    pub inline: Option<&'a [u8]>,
}

impl<'a> Parts<'a> {
    pub fn count(&self) -> usize {
        self.lens.len() / 8
    }

    /// Bytes that come in bulk sections.
    pub fn bulk(&self) -> u64 {
        self.bulk
    }

    /// All bytes.
    pub fn total(&self) -> u64 {
        self.total
    }

    pub fn lens(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.lens.chunks_exact(8).map(|bytes| read_u64(bytes) & !BULK_BIT)
    }

    pub fn iter(&self) -> impl Iterator<Item = Part<'a>> + use<'a> {
        let mut inline = self.inline;
        self.lens.chunks_exact(8).map(move |bytes| {
            let word = read_u64(bytes);
            if word & BULK_BIT != 0 {
                return Part { len: word & !BULK_BIT, inline: None };
            }
            // The parser checked that all inline parts are there.
            let len = usize::try_from(word).map_or(inline.len(), |len| len.min(inline.len()));
            let (part, rest) = inline.split_at(len);
            inline = rest.get(pad8(len) - len..).unwrap_or_default();
            Part { len: word, inline: Some(part) }
        })
    }
}

/// Decides for the parts of one payload, in order, which of them travel in bulk sections.
#[derive(Clone, Copy, Debug, Default)]
pub struct PartLayout {
    inline: usize,
}

impl PartLayout {
    pub fn is_bulk(&mut self, len: u64) -> bool {
        self.inline(len).is_none()
    }

    /// The length of a part that travels inline.
    pub(super) fn inline(&mut self, len: u64) -> Option<usize> {
        let len = usize::try_from(len).ok().filter(|_| len < BULK_MIN)?;
        let sum = self.inline + pad8(len);
        (sum <= MAX_INLINE).then(|| {
            self.inline = sum;
            len
        })
    }
}
