//! Frames: the messages in a control section. `docs/protocol.md` describes their layout.

mod parse;
mod parts;
pub mod put;
#[cfg(test)]
mod tests;

use super::limits::{CHALLENGE, MAX_KEY, MAX_META, MAX_REASON};
use super::role::Role;

pub use parse::{Frames, loan_pieces};
pub use parts::{PartLayout, Parts};

pub const FRAME_HEADER: usize = 16;
pub const DATA_FRAME: usize = 24;

/// RECV: frame and iteration follow.
const FLAG_LOOP: u8 = 1;
/// KEY: forget all keys defined so far.
const FLAG_FORGET: u8 = 1;
/// DATA: the rest of the payload will not come.
const FLAG_ABORT: u8 = 1;

/// A part length with this bit set belongs to a bulk part.
const BULK_BIT: u64 = 1 << 63;

/// Which side sends a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    Client = 1,
    Server = 2,
    Both = 3,
}

impl Sender {
    fn includes(self, role: Role) -> bool {
        let role = match role {
            Role::Client => Sender::Client,
            Role::Server => Sender::Server,
        };
        self as u8 & role as u8 != 0
    }
}

/// A number of a frame's fixed part, with its name in `docs/protocol.md`.
#[derive(Clone, Copy, Debug)]
pub enum Field {
    U32(&'static str),
    U64(&'static str),
    I64(&'static str),
    /// 64 bits that are there only with flag 1, and otherwise 0.
    Flagged(&'static str),
    /// 32 bits that must be 0.
    Zero,
    /// How many of something follow: 32 bits.
    Parts,
    /// The same: 64 bits.
    Pieces,
}

/// The most fields of a fixed part.
const MOST_FIELDS: usize = 4;

/// What a frame may hold; fields of its head that are not used must be 0.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub kind: u8,
    pub name: &'static str,
    pub sender: Sender,
    pub uses_id: bool,
    pub uses_code: bool,
    /// Known flags.
    pub flags: u8,
    /// Longest metadata.
    pub max_meta: usize,
    /// The numbers behind the head.
    pub fixed: &'static [Field],
}

impl Layout {
    /// Bits that must be 0 in the first four bytes of a frame, read as a number.
    const fn zeros(&self) -> u32 {
        let code = if self.uses_code { 0 } else { 0xFFFF };
        (code << 16) | ((!self.flags as u32) << 8)
    }
}

macro_rules! layouts {
    ($($kind:literal $name:ident $sender:ident $id:ident $code:ident $flags:expr, $meta:expr,
       [$($field:ident $(($named:literal))?),*];)*) => {
        mod kind {
            $(pub const $name: u8 = $kind;)*
        }

        /// Every kind of frame. A test compares `docs/protocol.md` with it.
        pub const LAYOUTS: &[Layout] = &[$(Layout {
            kind: $kind,
            name: stringify!($name),
            sender: Sender::$sender,
            uses_id: layouts!(@$id),
            uses_code: layouts!(@$code),
            flags: $flags,
            max_meta: $meta,
            fixed: &[$(Field::$field $(($named))?),*],
        }),*];
    };
    (@id) => { true };
    (@code) => { true };
    (@zero) => { false };
}

layouts! {
     0 PAD       Both   zero zero 0,           0,          [];
     1 HELLO     Client id   zero 0,           MAX_META,   [];
     2 WELCOME   Server id   zero 0,           MAX_META,   [];
     3 CHALLENGE Both   zero zero 0,           CHALLENGE,  [];
     4 REFUSE    Both   zero code 0,           MAX_REASON, [];
     5 MOVE      Both   zero code 0,           MAX_REASON, [];
    10 KEY       Client id   zero FLAG_FORGET, MAX_KEY,    [];
    11 RECV      Client id   zero FLAG_LOOP,   0,
       [I64("step id"), U64("key id"), Flagged("frame"), Flagged("iter")];
    12 CALL      Client id   code 0,           MAX_META,   [U32("deadline ms"), Parts];
    13 REPLY     Server id   code 0,           MAX_META,   [Parts, Zero];
    14 DATA      Both   id   zero FLAG_ABORT,  0,          [U64("length")];
    15 CANCEL    Client id   code 0,           0,          [];
    16 LEND      Both   id   zero 0,           0,          [U64("address of the witness"), Pieces];
    17 TAKEN     Both   id   zero 0,           0,          [];
    20 PING      Both   id   zero 0,           0,          [];
    21 PONG      Both   id   zero 0,           0,          [];
    22 GOODBYE   Both   zero zero 0,           MAX_REASON, [];
}

/// Each layout at the index of its kind, with its `zeros`.
static BY_KIND: [Option<(Layout, u32)>; 23] = {
    let mut by_kind = [None; 23];
    let mut at = 0;
    while at < LAYOUTS.len() {
        assert!(LAYOUTS[at].fixed.len() <= MOST_FIELDS);
        by_kind[LAYOUTS[at].kind as usize] = Some((LAYOUTS[at], LAYOUTS[at].zeros()));
        at += 1;
    }
    by_kind
};

/// One frame of a received control section; borrowed from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame<'a> {
    Hello(HelloFrame<'a>),
    Welcome(HelloFrame<'a>),
    Challenge(&'a [u8; CHALLENGE]),
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
    Recv(RecvFrame),
    Call(CallFrame<'a>),
    Reply(ReplyFrame<'a>),
    Data {
        id: u64,
        len: u64,
        abort: bool,
    },
    Cancel {
        id: u64,
        code: i32,
    },
    /// The bulk bytes of this block are in the sender's memory. `pieces`: 16 bytes each.
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

/// HELLO or WELCOME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HelloFrame<'a> {
    pub features: u64,
    pub fields: &'a [u8],
}

/// A word of the lender's memory that keeps its value as long as this connection lends anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Witness {
    pub address: u64,
    pub value: u64,
}

/// A rendezvous request: RECV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecvFrame {
    pub id: u64,
    pub step: i64,
    pub key: u64,
    pub frame: u64,
    pub iter: u64,
}

/// CALL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallFrame<'a> {
    pub id: u64,
    pub method: u16,
    pub deadline_ms: u32,
    pub meta: &'a [u8],
    pub parts: Parts<'a>,
}

/// REPLY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplyFrame<'a> {
    pub id: u64,
    pub code: i32,
    pub meta: &'a [u8],
    pub parts: Parts<'a>,
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
