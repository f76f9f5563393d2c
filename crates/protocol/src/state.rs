//! The heads of the calls by which another process of the same task copies the state of a parameter server, and takes
//! it over. `docs/protocol.md`, "Copies of a state", is their specification.

/// The method.
pub const STATE: u16 = 25;

const VERSION: u8 = 1;
const BYTES: usize = 24;
const MAX_ADDRESS: usize = 256;

/// Where a journal goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    pub journal: u64,
    pub offset: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StateRequest<'a> {
    /// The copy begins, or begins anew.
    Begin,
    Variable {
        id: u32,
        offset: u64,
    },
    /// What follows; what is before this is in the copy, and on its disk.
    Journal(Position),
    /// The other process wants the state. It will be at this address.
    TakeOver {
        address: &'a str,
    },
    /// The process at this address, which wants the state, has everything up to here.
    Confirm {
        position: Position,
        address: &'a str,
    },
    /// The copy goes on over another connection. With the checksum of the last bytes before this ([`TAIL`]).
    Resume {
        position: Position,
        crc: u32,
    },
}

/// So many bytes before its position say that a copy is one of this state, or all if there are fewer.
pub const TAIL: u64 = 4096;

/// The head of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateReply {
    /// The payload has id and bytes of the files of the variables, two u64 each. `state` tells it from a state that
    /// begins anew.
    Begun { journal: u64, state: u64 },
    /// The payload, and its checksum. `more`: so many bytes of the journals follow it at least.
    Piece { crc: u32, more: u64 },
    /// Nothing has been written.
    Nothing,
    /// The next journal has begun.
    Next,
    /// What was asked for is no longer there: the copy begins anew, unless it goes on with another `state`, as in
    /// [`StateReply::Begun`]. 0: nothing is said of that.
    Gone { state: u64 },
    /// The owner stops: the other process may ask for the state.
    Offered,
    /// No change follows after this.
    Prepared(Position),
    /// The state belongs to the other process.
    Yours,
}

/// Why a head cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("starwire: malformed head of a call about the state")]
pub struct MalformedState;

fn head(kind: u8, a: u64, b: u64) -> Vec<u8> {
    let mut meta = vec![VERSION, kind, 0, 0, 0, 0, 0, 0];
    meta.extend_from_slice(&a.to_le_bytes());
    meta.extend_from_slice(&b.to_le_bytes());
    meta
}

/// Kind, two numbers, and what follows.
fn fields(meta: &[u8]) -> Option<(u8, u64, u64, &[u8])> {
    let (head, rest) = meta.split_at_checked(BYTES)?;
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| head[at + i]));
    let is_known = head[0] == VERSION && head[2..8].iter().all(|byte| *byte == 0);
    is_known.then(|| (head[1], number(8), number(16), rest))
}

fn with_address(mut head: Vec<u8>, address: &str) -> Vec<u8> {
    head.extend_from_slice(address.as_bytes());
    head
}

fn address(rest: &[u8]) -> Result<&str, MalformedState> {
    let address = std::str::from_utf8(rest).map_err(|_| MalformedState)?;
    let is_one = (1..=MAX_ADDRESS).contains(&rest.len()) && address.chars().all(|c| !c.is_control());
    is_one.then_some(address).ok_or(MalformedState)
}

impl<'a> StateRequest<'a> {
    pub fn write(&self) -> Vec<u8> {
        match self {
            Self::Begin => head(0, 0, 0),
            Self::Variable { id, offset } => head(1, u64::from(*id), *offset),
            Self::Journal(Position { journal, offset }) => head(2, *journal, *offset),
            Self::TakeOver { address } => with_address(head(3, 0, 0), address),
            Self::Confirm { position: Position { journal, offset }, address } => {
                with_address(head(4, *journal, *offset), address)
            }
            Self::Resume { position: Position { journal, offset }, crc } => {
                let mut meta = head(5, *journal, *offset);
                meta.extend_from_slice(&crc.to_le_bytes());
                meta
            }
        }
    }

    pub fn read(meta: &'a [u8]) -> Result<Self, MalformedState> {
        let (kind, a, b, rest) = fields(meta).ok_or(MalformedState)?;
        let position = Position { journal: a, offset: b };
        let request = match kind {
            0 if (a, b) == (0, 0) => Self::Begin,
            1 => Self::Variable { id: u32::try_from(a).map_err(|_| MalformedState)?, offset: b },
            2 => Self::Journal(position),
            3 if (a, b) == (0, 0) => return Ok(Self::TakeOver { address: address(rest)? }),
            4 => return Ok(Self::Confirm { position, address: address(rest)? }),
            5 => {
                let crc = rest.try_into().map(u32::from_le_bytes).map_err(|_| MalformedState)?;
                return Ok(Self::Resume { position, crc });
            }
            _ => return Err(MalformedState),
        };
        if rest.is_empty() { Ok(request) } else { Err(MalformedState) }
    }
}

impl StateReply {
    pub fn write(&self) -> Vec<u8> {
        match *self {
            Self::Begun { journal, state } => head(0, journal, state),
            Self::Piece { crc, more } => head(1, u64::from(crc), more),
            Self::Nothing => head(2, 0, 0),
            Self::Next => head(3, 0, 0),
            Self::Gone { state } => head(4, state, 0),
            Self::Offered => head(5, 0, 0),
            Self::Prepared(Position { journal, offset }) => head(6, journal, offset),
            Self::Yours => head(7, 0, 0),
        }
    }

    pub fn read(meta: &[u8]) -> Result<Self, MalformedState> {
        let (kind, a, b, rest) = fields(meta).ok_or(MalformedState)?;
        let reply = match kind {
            0 => Self::Begun { journal: a, state: b },
            1 => Self::Piece { crc: u32::try_from(a).map_err(|_| MalformedState)?, more: b },
            2 => Self::Nothing,
            3 => Self::Next,
            4 => Self::Gone { state: a },
            5 => Self::Offered,
            6 => Self::Prepared(Position { journal: a, offset: b }),
            7 => Self::Yours,
            _ => return Err(MalformedState),
        };
        if rest.is_empty() { Ok(reply) } else { Err(MalformedState) }
    }
}

/// The checksum of a piece.
pub fn checksum(piece: &[u8]) -> u32 {
    crc32c::crc32c(piece)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn heads_are_read_as_they_were_written() {
        let position = Position { journal: 3, offset: 1 << 40 };
        for request in [
            StateRequest::Begin,
            StateRequest::Variable { id: u32::MAX, offset: 7 },
            StateRequest::Journal(position),
            StateRequest::TakeOver { address: "ps-0b:2222" },
            StateRequest::Confirm { position, address: "ps-0b:2222" },
            StateRequest::Resume { position, crc: 0x89AB_CDEF },
        ] {
            assert_eq!(StateRequest::read(&request.write()), Ok(request));
        }
        for reply in [
            StateReply::Begun { journal: 2, state: 1 << 40 },
            StateReply::Piece { crc: 0x89AB_CDEF, more: 9 },
            StateReply::Nothing,
            StateReply::Next,
            StateReply::Gone { state: 1 << 41 },
            StateReply::Offered,
            StateReply::Prepared(position),
            StateReply::Yours,
        ] {
            assert_eq!(StateReply::read(&reply.write()), Ok(reply));
        }
    }

    #[test]
    fn whatever_is_not_in_the_specification_is_refused() {
        let take = |address: &[u8]| [&head(3, 0, 0)[..], address].concat();
        for wrong in [
            &head(0, 1, 0)[..],
            &head(1, 1 << 32, 0),
            &head(5, 0, 0),
            &[&head(5, 1, 1)[..], b"12345"].concat(),
            &head(6, 0, 0),
            &[&head(3, 1, 0)[..], b"a"].concat(),
            &head(0, 0, 0)[..23],
            &[&head(2, 1, 2)[..], b"x"].concat(),
            &take(b""),
            &take(&[b'a'; 257]),
            &take(b"a\n"),
            &take(&[0xff]),
            &head(4, 1, 2),
            &[&[2], &head(0, 0, 0)[1..]].concat(),
            &[&[VERSION, 0, 1], &head(0, 0, 0)[3..]].concat(),
        ] {
            assert_eq!(StateRequest::read(wrong), Err(MalformedState), "{wrong:?}");
        }
        for wrong in [&head(1, 1 << 32, 0)[..], &head(8, 0, 0), b"", &[&head(2, 0, 0)[..], b"x"].concat()] {
            assert_eq!(StateReply::read(wrong), Err(MalformedState), "{wrong:?}");
        }
    }

    #[test]
    fn the_checksum_is_crc32c() {
        assert_eq!(checksum(b"123456789"), 0xe306_9283);
    }

    proptest! {
        #[test]
        fn whatever_is_read_is_written_the_same(meta in proptest::collection::vec(any::<u8>(), 0..40), kind in 0..8u8) {
            let mut meta = meta;
            if meta.len() >= 8 {
                meta[..8].copy_from_slice(&[VERSION, kind, 0, 0, 0, 0, 0, 0]);
            }
            if let Ok(request) = StateRequest::read(&meta) {
                prop_assert_eq!(request.write(), &meta[..]);
            }
        }
    }
}
