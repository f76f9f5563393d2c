//! Frames of a received control section. Each length is compared with its limit before it is used.

use super::{
    BULK_BIT, BY_KIND, CallFrame, FLAG_ABORT, FLAG_FORGET, FRAME_HEADER, Field, Frame, HelloFrame, Layout, MOST_FIELDS,
    Parts, RecvFrame, ReplyFrame, Witness, kind, pad8, read_u32, read_u64,
};
use crate::error::ProtocolError;
use crate::limits::{MAX_INLINE, MAX_PARTS, MAX_SEGMENTS};
use crate::role::Role;

/// Splits a control section into frames.
pub struct Frames<'a> {
    rest: &'a [u8],
    from: Role,
    name: &'static str,
}

impl<'a> Frames<'a> {
    /// A section from the side with this role.
    pub fn new(section: &'a [u8], from: Role) -> Self {
        Frames { rest: section, from, name: "" }
    }

    /// The name of the last frame.
    pub fn name(&self) -> &'static str {
        self.name
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
        let Some(Some((layout, zeros))) = BY_KIND.get(usize::from(kind)) else {
            return Err(ProtocolError::UnknownFrame { kind });
        };
        self.name = layout.name;
        if !layout.sender.includes(self.from) {
            let when = match self.from {
                Role::Client => "from the client side",
                Role::Server => "from the server side",
            };
            return Err(ProtocolError::Unexpected { frame: layout.name, when });
        }
        let mut cursor = Cursor { name: layout.name, bytes: self.rest, at: 0 };
        let frame = parse(layout, *zeros, &mut cursor)?;
        self.rest = &self.rest[cursor.at..];
        Ok(Some(frame))
    }
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

    fn u32(&mut self) -> Result<u64, ProtocolError> {
        Ok(read_u32(self.take(4)?).into())
    }

    fn u64(&mut self) -> Result<u64, ProtocolError> {
        Ok(read_u64(self.take(8)?))
    }

    fn fixed(&mut self, layout: &Layout, flags: u8) -> Result<Fixed, ProtocolError> {
        let limited = |value: u64, limit: usize, what| match usize::try_from(value) {
            Ok(count) if count <= limit => Ok(count),
            _ => Err(ProtocolError::TooLarge { what, value, limit: limit as u64 }),
        };
        let mut fixed = Fixed::default();
        for (number, field) in fixed.numbers.iter_mut().zip(layout.fixed) {
            match field {
                Field::U32(_) => *number = self.u32()?,
                Field::U64(_) | Field::I64(_) => *number = self.u64()?,
                Field::Flagged(_) if flags & 1 == 0 => (),
                Field::Flagged(_) => *number = self.u64()?,
                Field::Zero if self.u32()? != 0 => return Err(self.error("reserved bits are set")),
                Field::Zero => (),
                Field::Parts => fixed.count = limited(self.u32()?, MAX_PARTS, "number of parts of a payload")?,
                Field::Pieces => fixed.count = limited(self.u64()?, MAX_SEGMENTS, "number of pieces of a loan")?,
            }
        }
        Ok(fixed)
    }
}

/// The numbers of a fixed part, in the layout's order.
#[derive(Default)]
struct Fixed {
    numbers: [u64; MOST_FIELDS],
    /// Parts or pieces.
    count: usize,
}

/// The fields of a frame's head, checked against its layout.
struct Head {
    flags: u8,
    code: u16,
    meta: usize,
    id: u64,
}

impl Head {
    fn take(layout: &Layout, zeros: u32, cursor: &mut Cursor<'_>) -> Result<Head, ProtocolError> {
        let bytes = cursor.take(FRAME_HEADER)?;
        let head = Head {
            flags: bytes[1],
            code: u16::from_le_bytes([bytes[2], bytes[3]]),
            meta: read_u32(&bytes[4..8]) as usize,
            id: read_u64(&bytes[8..16]),
        };
        if read_u32(bytes) & zeros != 0 {
            let unknown = head.flags & !layout.flags != 0;
            return Err(cursor.error(if unknown { "unknown flags" } else { "the code must be 0" }));
        }
        if head.meta > layout.max_meta {
            let (value, limit) = (head.meta as u64, layout.max_meta as u64);
            return Err(ProtocolError::TooLarge { what: "length of the metadata of a frame", value, limit });
        }
        if head.id != 0 && !layout.uses_id {
            return Err(cursor.error("the id must be 0"));
        }
        Ok(head)
    }
}

fn parse<'a>(layout: &Layout, zeros: u32, cursor: &mut Cursor<'a>) -> Result<Frame<'a>, ProtocolError> {
    let Head { flags, code, meta, id } = Head::take(layout, zeros, cursor)?;
    let Fixed { numbers, count } = cursor.fixed(layout, flags)?;
    let hello = |fields| HelloFrame { features: id, fields };
    let status = i32::from(code);
    Ok(match layout.kind {
        kind::HELLO => Frame::Hello(hello(cursor.take_padded(meta)?)),
        kind::WELCOME => Frame::Welcome(hello(cursor.take_padded(meta)?)),
        kind::CHALLENGE => {
            let random = cursor.take_padded(meta)?;
            Frame::Challenge(random.try_into().map_err(|_| cursor.error("it has another length"))?)
        }
        kind::REFUSE => Frame::Refuse { code: status, reason: cursor.take_padded(meta)? },
        kind::MOVE => Frame::Move { code: status, meta: cursor.take_padded(meta)? },
        kind::KEY => Frame::Key { key: id, forget: flags & FLAG_FORGET != 0, prefix: cursor.take_padded(meta)? },
        kind::RECV => {
            let [step, key, frame, iter] = numbers;
            Frame::Recv(RecvFrame { id, step: i64::from_le_bytes(step.to_le_bytes()), key, frame, iter })
        }
        kind::CALL => {
            if code == 0 {
                return Err(cursor.error("method 0 does not exist"));
            }
            #[expect(clippy::cast_possible_truncation, reason = "it has 32 bits")]
            let deadline_ms = numbers[0] as u32;
            let (meta, parts) = parse_payload(cursor, count, meta)?;
            Frame::Call(CallFrame { id, method: code, deadline_ms, meta, parts })
        }
        kind::REPLY => {
            let (meta, parts) = parse_payload(cursor, count, meta)?;
            Frame::Reply(ReplyFrame { id, code: status, meta, parts })
        }
        kind::DATA => {
            let [len, ..] = numbers;
            let abort = flags & FLAG_ABORT != 0;
            if abort != (len == 0) {
                return Err(cursor.error("the abort flag must be set exactly when the length is 0"));
            }
            Frame::Data { id, len, abort }
        }
        kind::CANCEL => Frame::Cancel { id, code: status },
        kind::LEND => {
            let [address, ..] = numbers;
            Frame::Lend { witness: Witness { address, value: id }, pieces: cursor.take(count * 16)? }
        }
        kind::TAKEN => Frame::Taken { blocks: id },
        kind::PING => Frame::Ping { nonce: id },
        kind::PONG => Frame::Pong { nonce: id },
        kind::GOODBYE => Frame::Goodbye { reason: cursor.take_padded(meta)? },
        kind => return Err(ProtocolError::UnknownFrame { kind }),
    })
}

fn parse_payload<'a>(
    cursor: &mut Cursor<'a>,
    count: usize,
    meta_len: usize,
) -> Result<(&'a [u8], Parts<'a>), ProtocolError> {
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
