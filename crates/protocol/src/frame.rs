//! The frame codec: control sections in, frames out, and the other way round.

use super::error::ProtocolError;
use super::lending::Witness;
use super::limits::{BULK_MIN, MAX_INLINE, MAX_KEY, MAX_META, MAX_PARTS, MAX_REASON, MAX_SEGMENTS};

pub const FRAME_HEADER: usize = 16;
pub const DATA_FRAME: usize = 24;

mod kind {
    pub const PAD: u8 = 0;
    pub const HELLO: u8 = 1;
    pub const WELCOME: u8 = 2;
    pub const PROOF: u8 = 3;
    pub const REFUSE: u8 = 4;
    pub const MOVE: u8 = 5;
    pub const KEY: u8 = 10;
    pub const RECV: u8 = 11;
    pub const CALL: u8 = 12;
    pub const REPLY: u8 = 13;
    pub const DATA: u8 = 14;
    pub const CANCEL: u8 = 15;
    pub const LEND: u8 = 16;
    pub const TAKEN: u8 = 17;
    pub const PING: u8 = 20;
    pub const PONG: u8 = 21;
    pub const GOODBYE: u8 = 22;
}

/// RECV: frame and iteration follow.
const FLAG_LOOP: u8 = 1;
/// KEY: forget all keys defined so far.
const FLAG_FORGET: u8 = 1;
/// DATA: the rest of the payload will not come.
const FLAG_ABORT: u8 = 1;

/// A part length with this bit set belongs to a bulk part.
const BULK_BIT: u64 = 1 << 63;

/// One frame of a received control section; borrowed from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    /// `bytes`: the whole frame without padding, for the transcript.
    Hello {
        version: u16,
        features: u64,
        fields: &'a [u8],
        bytes: &'a [u8],
    },
    Welcome {
        version: u16,
        features: u64,
        fields: &'a [u8],
        bytes: &'a [u8],
    },
    Proof {
        mac: &'a [u8],
    },
    Refuse {
        code: i32,
        reason: &'a [u8],
    },
    /// `meta`: the endpoint of a queue pair, or the reason for a code that is not 0.
    Move {
        code: i32,
        meta: &'a [u8],
    },
    Key {
        key: u64,
        forget: bool,
        prefix: &'a [u8],
    },
    Recv {
        id: u64,
        step: i64,
        key: u64,
        frame: u64,
        iter: u64,
    },
    Call {
        id: u64,
        method: u16,
        deadline_ms: u32,
        meta: &'a [u8],
        parts: Parts<'a>,
    },
    Reply {
        id: u64,
        code: i32,
        meta: &'a [u8],
        parts: Parts<'a>,
    },
    Data {
        id: u64,
        len: u64,
        abort: bool,
    },
    Cancel {
        id: u64,
        code: i32,
    },
    /// The bulk bytes of this block lie in the sender's memory. `pieces`: 16 bytes each.
    Lend {
        witness: Witness,
        pieces: &'a [u8],
    },
    /// 0: the sender can read the receiver's memory.
    Taken {
        blocks: u64,
    },
    Ping {
        nonce: u64,
    },
    Pong {
        nonce: u64,
    },
    Goodbye {
        reason: &'a [u8],
    },
}

impl Frame<'_> {
    pub fn name(&self) -> &'static str {
        match self {
            Frame::Hello { .. } => "HELLO",
            Frame::Welcome { .. } => "WELCOME",
            Frame::Proof { .. } => "PROOF",
            Frame::Refuse { .. } => "REFUSE",
            Frame::Move { .. } => "MOVE",
            Frame::Key { .. } => "KEY",
            Frame::Recv { .. } => "RECV",
            Frame::Call { .. } => "CALL",
            Frame::Reply { .. } => "REPLY",
            Frame::Data { .. } => "DATA",
            Frame::Cancel { .. } => "CANCEL",
            Frame::Lend { .. } => "LEND",
            Frame::Taken { .. } => "TAKEN",
            Frame::Ping { .. } => "PING",
            Frame::Pong { .. } => "PONG",
            Frame::Goodbye { .. } => "GOODBYE",
        }
    }
}

/// The payload of a CALL or REPLY: part lengths and the bytes of the inline parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parts<'a> {
    /// 8 bytes each.
    lens: &'a [u8],
    inline: &'a [u8],
    bulk: u64,
    total: u64,
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

    pub fn iter(&self) -> impl Iterator<Item = Part<'a>> + use<'a> {
        let mut inline = self.inline;
        self.lens.chunks_exact(8).map(move |bytes| {
            let word = read_u64(bytes);
            if word & BULK_BIT != 0 {
                return Part { len: word & !BULK_BIT, inline: None };
            }
            // The constructor checked that all inline parts are there.
            let len = (word as usize).min(inline.len());
            let (part, rest) = inline.split_at(len);
            inline = rest.get(pad8(len) - len..).unwrap_or_default();
            Part { len: word, inline: Some(part) }
        })
    }
}

/// Splits a control section into frames.
pub struct Frames<'a> {
    rest: &'a [u8],
}

impl<'a> Frames<'a> {
    pub fn new(section: &'a [u8]) -> Self {
        Frames { rest: section }
    }

    /// The next frame, None at the end of the section.
    pub fn next(&mut self) -> Result<Option<Frame<'a>>, ProtocolError> {
        let Some(&kind) = self.rest.first() else { return Ok(None) };
        if kind == kind::PAD {
            if self.rest.iter().any(|&byte| byte != 0) {
                return Err(ProtocolError::Frame { frame: "PAD", why: "padding is not zero" });
            }
            self.rest = &[];
            return Ok(None);
        }
        let mut cursor = Cursor { name: name_of(kind)?, bytes: self.rest, at: 0 };
        let frame = parse(kind, &mut cursor)?;
        self.rest = &self.rest[cursor.at..];
        Ok(Some(frame))
    }
}

fn name_of(kind: u8) -> Result<&'static str, ProtocolError> {
    Ok(match kind {
        kind::HELLO => "HELLO",
        kind::WELCOME => "WELCOME",
        kind::PROOF => "PROOF",
        kind::REFUSE => "REFUSE",
        kind::MOVE => "MOVE",
        kind::KEY => "KEY",
        kind::RECV => "RECV",
        kind::CALL => "CALL",
        kind::REPLY => "REPLY",
        kind::DATA => "DATA",
        kind::CANCEL => "CANCEL",
        kind::LEND => "LEND",
        kind::TAKEN => "TAKEN",
        kind::PING => "PING",
        kind::PONG => "PONG",
        kind::GOODBYE => "GOODBYE",
        _ => return Err(ProtocolError::UnknownFrame { kind }),
    })
}

struct Cursor<'a> {
    name: &'static str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn error(&self, why: &'static str) -> ProtocolError {
        ProtocolError::Frame { frame: self.name, why }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], ProtocolError> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.bytes.len());
        let end = end.ok_or_else(|| self.error("it exceeds its control section"))?;
        let taken = &self.bytes[self.at..end];
        self.at = end;
        Ok(taken)
    }

    /// Bytes and the zero bytes behind them up to a multiple of 8.
    fn take_padded(&mut self, len: usize) -> Result<&'a [u8], ProtocolError> {
        let taken = self.take(len)?;
        let padding = self.take(pad8(len) - len)?;
        if padding.iter().any(|&byte| byte != 0) {
            return Err(self.error("padding is not zero"));
        }
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, ProtocolError> {
        Ok(read_u32(self.take(4)?))
    }

    fn u64(&mut self) -> Result<u64, ProtocolError> {
        Ok(read_u64(self.take(8)?))
    }
}

fn parse<'a>(kind: u8, cursor: &mut Cursor<'a>) -> Result<Frame<'a>, ProtocolError> {
    let start = cursor.bytes;
    let head = cursor.take(FRAME_HEADER)?;
    let flags = head[1];
    let code = u16::from_le_bytes([head[2], head[3]]);
    let meta_len = read_u32(&head[4..8]) as usize;
    let id = read_u64(&head[8..16]);

    let known_flags = match kind {
        kind::RECV => FLAG_LOOP,
        kind::KEY => FLAG_FORGET,
        kind::DATA => FLAG_ABORT,
        _ => 0,
    };
    if flags & !known_flags != 0 {
        return Err(cursor.error("unknown flags"));
    }
    let limit = match kind {
        kind::CALL | kind::REPLY | kind::HELLO | kind::WELCOME => MAX_META,
        kind::PROOF => 32,
        kind::REFUSE | kind::MOVE | kind::GOODBYE => MAX_REASON,
        kind::KEY => MAX_KEY,
        _ => 0,
    };
    if meta_len > limit {
        let (value, limit) = (meta_len as u64, limit as u64);
        return Err(ProtocolError::TooLarge { what: "length of the metadata of a frame", value, limit });
    }
    let uses_code = !matches!(
        kind,
        kind::PROOF
            | kind::KEY
            | kind::RECV
            | kind::DATA
            | kind::LEND
            | kind::TAKEN
            | kind::PING
            | kind::PONG
            | kind::GOODBYE
    );
    if !uses_code && code != 0 {
        return Err(cursor.error("the code must be 0"));
    }
    let uses_id = !matches!(kind, kind::PROOF | kind::REFUSE | kind::MOVE | kind::GOODBYE);
    if !uses_id && id != 0 {
        return Err(cursor.error("the id must be 0"));
    }

    Ok(match kind {
        kind::HELLO | kind::WELCOME => {
            let fields = cursor.take_padded(meta_len)?;
            let bytes = &start[..FRAME_HEADER + meta_len];
            match kind {
                kind::HELLO => Frame::Hello { version: code, features: id, fields, bytes },
                _ => Frame::Welcome { version: code, features: id, fields, bytes },
            }
        }
        kind::PROOF => Frame::Proof { mac: cursor.take_padded(meta_len)? },
        kind::REFUSE => Frame::Refuse { code: i32::from(code), reason: cursor.take_padded(meta_len)? },
        kind::MOVE => Frame::Move { code: i32::from(code), meta: cursor.take_padded(meta_len)? },
        kind::KEY => Frame::Key { key: id, forget: flags & FLAG_FORGET != 0, prefix: cursor.take_padded(meta_len)? },
        kind::RECV => {
            let step = i64::from_le_bytes(cursor.u64()?.to_le_bytes());
            let key = cursor.u64()?;
            let (frame, iter) = if flags & FLAG_LOOP != 0 { (cursor.u64()?, cursor.u64()?) } else { (0, 0) };
            Frame::Recv { id, step, key, frame, iter }
        }
        kind::CALL => {
            if code == 0 {
                return Err(cursor.error("method 0 does not exist"));
            }
            let deadline_ms = cursor.u32()?;
            let count = cursor.u32()?;
            let (meta, parts) = parse_payload(cursor, count, meta_len)?;
            Frame::Call { id, method: code, deadline_ms, meta, parts }
        }
        kind::REPLY => {
            let count = cursor.u32()?;
            if cursor.u32()? != 0 {
                return Err(cursor.error("reserved bits are set"));
            }
            let (meta, parts) = parse_payload(cursor, count, meta_len)?;
            Frame::Reply { id, code: i32::from(code), meta, parts }
        }
        kind::DATA => {
            let len = cursor.u64()?;
            let abort = flags & FLAG_ABORT != 0;
            if abort != (len == 0) {
                return Err(cursor.error("the abort flag must be set exactly when the length is 0"));
            }
            Frame::Data { id, len, abort }
        }
        kind::CANCEL => Frame::Cancel { id, code: i32::from(code) },
        kind::LEND => {
            let witness = Witness { address: cursor.u64()?, value: id };
            let count = cursor.u64()?;
            if count > MAX_SEGMENTS as u64 {
                let limit = MAX_SEGMENTS as u64;
                return Err(ProtocolError::TooLarge { what: "number of pieces of a loan", value: count, limit });
            }
            Frame::Lend { witness, pieces: cursor.take(count as usize * 16)? }
        }
        kind::TAKEN => Frame::Taken { blocks: id },
        kind::PING => Frame::Ping { nonce: id },
        kind::PONG => Frame::Pong { nonce: id },
        kind::GOODBYE => Frame::Goodbye { reason: cursor.take_padded(meta_len)? },
        _ => return Err(ProtocolError::UnknownFrame { kind }),
    })
}

fn parse_payload<'a>(
    cursor: &mut Cursor<'a>,
    count: u32,
    meta_len: usize,
) -> Result<(&'a [u8], Parts<'a>), ProtocolError> {
    let count = count as usize;
    if count > MAX_PARTS {
        let (value, limit) = (count as u64, MAX_PARTS as u64);
        return Err(ProtocolError::TooLarge { what: "number of parts of a payload", value, limit });
    }
    let lens = cursor.take(count * 8)?;
    let meta = cursor.take_padded(meta_len)?;
    let start = cursor.at;
    let (mut bulk, mut total) = (0u64, 0u64);
    for bytes in lens.chunks_exact(8) {
        let word = read_u64(bytes);
        let len = word & !BULK_BIT;
        total = total.checked_add(len).ok_or_else(|| cursor.error("the length of the payload overflows"))?;
        if word & BULK_BIT == 0 {
            let room = (MAX_INLINE + start - cursor.at) as u64;
            if len > room || pad8(len as usize) as u64 > room {
                return Err(cursor.error("its inline parts are too long"));
            }
            cursor.take_padded(len as usize)?;
        } else if len == 0 {
            return Err(cursor.error("a bulk part is empty"));
        } else {
            bulk += len;
        }
    }
    let inline = &cursor.bytes[start..cursor.at];
    Ok((meta, Parts { lens, inline, bulk, total }))
}

/// Address and length of each piece of a loan.
pub fn loan_pieces(bytes: &[u8]) -> Vec<(u64, u64)> {
    bytes.chunks_exact(16).map(|piece| (read_u64(piece), read_u64(&piece[8..]))).collect()
}

/// The next multiple of 8.
pub fn pad8(len: usize) -> usize {
    (len + 7) & !7
}

fn read_u32(bytes: &[u8]) -> u32 {
    bytes.first_chunk().map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

fn read_u64(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Decides for the parts of one payload, in order, which of them travel in bulk sections.
#[derive(Clone, Copy, Debug, Default)]
pub struct Placement {
    inline: usize,
}

impl Placement {
    pub fn is_bulk(&mut self, len: u64) -> bool {
        if len >= BULK_MIN || self.inline + pad8(len as usize) > MAX_INLINE {
            return len != 0;
        }
        self.inline += pad8(len as usize);
        false
    }
}

/// Appends frames to a control section that is a multiple of 8 long, and leaves it so.
pub mod put {
    use super::*;
    use crate::handler::Payload;

    fn head(out: &mut Vec<u8>, kind: u8, flags: u8, code: u16, meta_len: usize, id: u64) {
        let mut bytes = [0u8; FRAME_HEADER];
        bytes[0] = kind;
        bytes[1] = flags;
        bytes[2..4].copy_from_slice(&code.to_le_bytes());
        // Callers keep metadata below MAX_META.
        bytes[4..8].copy_from_slice(&(meta_len as u32).to_le_bytes());
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        out.extend_from_slice(&bytes);
    }

    fn padded(out: &mut Vec<u8>, bytes: &[u8]) {
        out.extend_from_slice(bytes);
        out.resize(pad8(out.len()), 0);
    }

    pub fn hello(out: &mut Vec<u8>, version: u16, features: u64, fields: &[u8]) {
        head(out, kind::HELLO, 0, version, fields.len(), features);
        padded(out, fields);
    }

    pub fn welcome(out: &mut Vec<u8>, version: u16, features: u64, fields: &[u8]) {
        head(out, kind::WELCOME, 0, version, fields.len(), features);
        padded(out, fields);
    }

    pub fn proof(out: &mut Vec<u8>, mac: &[u8; 32]) {
        head(out, kind::PROOF, 0, 0, mac.len(), 0);
        padded(out, mac);
    }

    pub fn refuse(out: &mut Vec<u8>, code: i32, reason: &str) {
        let reason = cut(reason, MAX_REASON);
        head(out, kind::REFUSE, 0, wire_code(code), reason.len(), 0);
        padded(out, reason.as_bytes());
    }

    /// `code` 0: `meta` is an endpoint; else it is the reason, cut if need be.
    pub fn moving(out: &mut Vec<u8>, code: i32, meta: &[u8]) {
        let meta = &meta[..meta.len().min(MAX_REASON)];
        head(out, kind::MOVE, 0, if code == 0 { 0 } else { wire_code(code) }, meta.len(), 0);
        padded(out, meta);
    }

    pub fn goodbye(out: &mut Vec<u8>, reason: &str) {
        let reason = cut(reason, MAX_REASON);
        head(out, kind::GOODBYE, 0, 0, reason.len(), 0);
        padded(out, reason.as_bytes());
    }

    pub fn key(out: &mut Vec<u8>, key: u64, forget: bool, prefix: &[u8]) {
        head(out, kind::KEY, if forget { FLAG_FORGET } else { 0 }, 0, prefix.len(), key);
        padded(out, prefix);
    }

    pub fn recv(out: &mut Vec<u8>, id: u64, step: i64, key: u64, frame: u64, iter: u64) {
        let mut bytes = [0u8; 48];
        bytes[0] = kind::RECV;
        bytes[8..16].copy_from_slice(&id.to_le_bytes());
        bytes[16..24].copy_from_slice(&step.to_le_bytes());
        bytes[24..32].copy_from_slice(&key.to_le_bytes());
        if frame == 0 && iter == 0 {
            out.extend_from_slice(&bytes[..32]);
        } else {
            bytes[1] = FLAG_LOOP;
            bytes[32..40].copy_from_slice(&frame.to_le_bytes());
            bytes[40..48].copy_from_slice(&iter.to_le_bytes());
            out.extend_from_slice(&bytes);
        }
    }

    pub fn cancel(out: &mut Vec<u8>, id: u64, code: i32) {
        head(out, kind::CANCEL, 0, wire_code(code), 0, id);
    }

    /// Length of the frame for so many pieces.
    pub fn lend_len(pieces: usize) -> usize {
        FRAME_HEADER + 16 + 16 * pieces
    }

    pub fn lend(out: &mut Vec<u8>, witness: Witness, pieces: &[(u64, u64)]) {
        head(out, kind::LEND, 0, 0, 0, witness.value);
        out.extend_from_slice(&witness.address.to_le_bytes());
        out.extend_from_slice(&(pieces.len() as u64).to_le_bytes());
        for (address, len) in pieces {
            out.extend_from_slice(&address.to_le_bytes());
            out.extend_from_slice(&len.to_le_bytes());
        }
    }

    pub fn taken(out: &mut Vec<u8>, blocks: u64) {
        head(out, kind::TAKEN, 0, 0, 0, blocks);
    }

    pub fn data(out: &mut Vec<u8>, id: u64, len: u64) {
        head(out, kind::DATA, if len == 0 { FLAG_ABORT } else { 0 }, 0, 0, id);
        out.extend_from_slice(&len.to_le_bytes());
    }

    pub fn ping(out: &mut Vec<u8>, nonce: u64) {
        head(out, kind::PING, 0, 0, 0, nonce);
    }

    pub fn pong(out: &mut Vec<u8>, nonce: u64) {
        head(out, kind::PONG, 0, 0, 0, nonce);
    }

    pub fn call<P: Payload>(
        out: &mut Vec<u8>,
        id: u64,
        method: u16,
        deadline_ms: u32,
        meta: &[u8],
        payload: Option<&P>,
    ) {
        head(out, kind::CALL, 0, method, meta.len(), id);
        out.extend_from_slice(&deadline_ms.to_le_bytes());
        self::payload(out, payload, meta, false);
    }

    pub fn reply<P: Payload>(out: &mut Vec<u8>, id: u64, code: i32, meta: &[u8], payload: Option<&P>) {
        let code = if code == 0 { 0 } else { wire_code(code) };
        head(out, kind::REPLY, 0, code, meta.len(), id);
        self::payload(out, payload, meta, true);
    }

    /// Part count (and reserved bits), part lengths, metadata, inline parts.
    fn payload<P: Payload>(out: &mut Vec<u8>, payload: Option<&P>, meta: &[u8], reserved: bool) {
        let count = payload.map_or(0, Payload::part_count);
        out.extend_from_slice(&(count as u32).to_le_bytes());
        if reserved {
            out.extend_from_slice(&[0; 4]);
        }
        let Some(payload) = payload else { return padded(out, meta) };
        let mut placement = Placement::default();
        for part in 0..count {
            let len = payload.part_len(part);
            let word = if placement.is_bulk(len) { len | BULK_BIT } else { len };
            out.extend_from_slice(&word.to_le_bytes());
        }
        padded(out, meta);
        let mut placement = Placement::default();
        for part in 0..count {
            let len = payload.part_len(part);
            if !placement.is_bulk(len) {
                let end = out.len() + len as usize;
                payload.copy_part(part, out);
                debug_assert_eq!(out.len(), end, "a payload copied a length other than it announced");
                // Whatever the payload did, the frame stays well-formed.
                out.resize(end, 0);
                out.resize(pad8(end), 0);
            }
        }
    }

    /// At most `max` bytes of a text, not cutting a character.
    pub fn cut(text: &str, max: usize) -> &str {
        let mut end = text.len().min(max);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        &text[..end]
    }

    /// Status codes are small positive numbers; anything else is a mistake of the caller and becomes Unknown.
    fn wire_code(code: i32) -> u16 {
        u16::try_from(code).ok().filter(|&code| code != 0).unwrap_or(2)
    }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
