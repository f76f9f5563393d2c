//! Where the bytes of a stream come from and go to.

use std::rc::Rc;

/// Where the next bytes of the stream belong. Targets are filled in order; only the last one can be scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Control bytes: `Connection::scratch_mut(offset, len)`.
    Scratch { offset: usize, len: usize },
    /// Bytes `offset..offset+len` of part `part` of the reply to request `id` (`Connection::op_mut(id)`).
    Reply { id: u64, part: usize, offset: u64, len: u64 },
    /// Bytes of part `part` of the incoming call `id` (`Connection::body_mut(id)`).
    Call { id: u64, part: usize, offset: u64, len: u64 },
    /// Bytes that are no longer wanted.
    Discard { len: u64 },
}

/// A piece of an outgoing block.
pub enum Segment<P> {
    /// Return the vector with `Connection::recycle` once it is written.
    Control(Vec<u8>),
    Part {
        payload: Rc<P>,
        part: usize,
        offset: u64,
        len: u64,
    },
}

impl<P> Segment<P> {
    /// Bytes of this segment.
    pub fn len(&self) -> u64 {
        match self {
            Segment::Control(bytes) => bytes.len() as u64,
            Segment::Part { len, .. } => *len,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_is_as_long_as_its_bytes() {
        let control = |bytes: &[u8]| Segment::<()>::Control(bytes.to_vec());
        assert_eq!((control(b"abc").len(), control(b"abc").is_empty()), (3, false));
        assert_eq!((control(b"").len(), control(b"").is_empty()), (0, true));
        let part = Segment::Part { payload: Rc::new(()), part: 1, offset: 2, len: 5 };
        assert_eq!((part.len(), part.is_empty()), (5, false));
    }
}
