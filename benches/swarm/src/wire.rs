//! Protocol buffers as TensorFlow sends them: a few fields are changed, everything else passes byte for byte.

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'a> {
    Varint(u64),
    Fixed64(u64),
    Bytes(&'a [u8]),
    Fixed32(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    pub number: u32,
    pub value: Value<'a>,
    /// All of it, as it stands in the message.
    pub raw: &'a [u8],
}

/// The bytes are no protocol buffer.
#[derive(Debug, PartialEq, Eq)]
pub struct Malformed;

/// The fields of a message, in order.
pub fn fields(message: &[u8]) -> impl Iterator<Item = Result<Field<'_>, Malformed>> {
    let mut rest = message;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let field = take(&mut rest).ok_or(Malformed);
        if field.is_err() {
            rest = &[];
        }
        Some(field)
    })
}

/// The first field of this number.
pub fn find(message: &[u8], number: u32) -> Result<Option<Value<'_>>, Malformed> {
    for field in fields(message) {
        let field = field?;
        if field.number == number {
            return Ok(Some(field.value));
        }
    }
    Ok(None)
}

fn take<'a>(rest: &mut &'a [u8]) -> Option<Field<'a>> {
    let begin = *rest;
    let tag = take_varint(rest)?;
    let number = u32::try_from(tag >> 3).ok().filter(|n| *n != 0)?;
    let value = match tag & 7 {
        0 => Value::Varint(take_varint(rest)?),
        1 => Value::Fixed64(u64::from_le_bytes(take_bytes(rest, 8)?.try_into().ok()?)),
        2 => {
            let len = usize::try_from(take_varint(rest)?).ok()?;
            Value::Bytes(take_bytes(rest, len)?)
        }
        5 => Value::Fixed32(u32::from_le_bytes(take_bytes(rest, 4)?.try_into().ok()?)),
        _ => return None,
    };
    Some(Field { number, value, raw: begin.get(..begin.len() - rest.len())? })
}

fn take_bytes<'a>(rest: &mut &'a [u8], len: usize) -> Option<&'a [u8]> {
    let (taken, left) = rest.split_at_checked(len)?;
    *rest = left;
    Some(taken)
}

fn take_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0u64;
    for shift in (0..64).step_by(7) {
        let byte = *take_bytes(rest, 1)?.first()?;
        value |= u64::from(byte & 0x7F) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

pub fn put(out: &mut Vec<u8>, number: u32, value: Value<'_>) {
    let tag = u64::from(number) << 3;
    match value {
        Value::Varint(n) => {
            put_varint(out, tag);
            put_varint(out, n);
        }
        Value::Fixed64(n) => {
            put_varint(out, tag | 1);
            out.extend_from_slice(&n.to_le_bytes());
        }
        Value::Bytes(bytes) => {
            put_varint(out, tag | 2);
            put_varint(out, bytes.len() as u64);
            out.extend_from_slice(bytes);
        }
        Value::Fixed32(n) => {
            put_varint(out, tag | 5);
            out.extend_from_slice(&n.to_le_bytes());
        }
    }
}

fn put_varint(out: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        out.push((n & 0x7F) as u8 | 0x80);
        n >>= 7;
    }
    out.push((n & 0x7F) as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_is_found() {
        let mut message = Vec::new();
        let values = [
            Value::Varint(0),
            Value::Varint(u64::MAX),
            Value::Fixed64(7),
            Value::Bytes(b"text"),
            Value::Fixed32(9),
            Value::Bytes(b""),
        ];
        for (number, value) in (1..).zip(values) {
            put(&mut message, number, value);
        }
        let found: Vec<_> = fields(&message).map(|f| f.map(|f| (f.number, f.value))).collect();
        assert_eq!(found, (1..).zip(values).map(Ok).collect::<Vec<_>>());
        let raw: Vec<u8> = fields(&message).flat_map(|f| f.map(|f| f.raw.to_vec()).unwrap_or_default()).collect();
        assert_eq!(raw, message);
        assert_eq!(find(&message, 4), Ok(Some(Value::Bytes(b"text"))));
        assert_eq!(find(&message, 40), Ok(None));
    }

    #[test]
    fn what_is_cut_short_is_malformed() {
        let mut message = Vec::new();
        put(&mut message, 300, Value::Bytes(b"text"));
        for len in 1..message.len() {
            assert_eq!(fields(&message[..len]).last(), Some(Err(Malformed)), "{len}");
        }
        assert_eq!(fields(&[0xFF; 30]).next(), Some(Err(Malformed)));
        assert_eq!(fields(b"\x03").next(), Some(Err(Malformed)));
    }
}
