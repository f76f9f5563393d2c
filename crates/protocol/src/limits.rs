//! Every bound of the protocol. A number from the wire is compared with one of these before anything is allocated or
//! indexed.

/// Size of a block header.
pub const HEADER: usize = 32;
/// What a reader asks for at a block boundary. A block with bulk bytes has at least this many bytes in front of them.
pub const FIRST_READ: usize = 1024;
/// Longest control section.
pub const MAX_CONTROL: usize = 4 << 20;
/// Longest control section before the handshake is done: a stranger costs no more than this.
pub const MAX_HANDSHAKE_CONTROL: usize = 4096;
/// Longest bulk section of one block.
pub const MAX_BULK: u64 = 16 << 20;
/// Longest metadata of a CALL or REPLY.
pub const MAX_META: usize = 1 << 20;
/// Longest error message and longest error details that travel; longer ones are cut or dropped by the sender.
pub const MAX_MESSAGE: usize = 64 << 10;
/// A part that is at least this long travels in bulk sections.
pub const BULK_MIN: u64 = 8 << 10;
/// All inline parts of one frame together, padding included.
pub const MAX_INLINE: usize = 1 << 20;
/// Parts of one payload.
pub const MAX_PARTS: usize = 1 << 16;
/// Longest rendezvous key prefix.
pub const MAX_KEY: usize = 4096;
/// Steps for whose tensors one peer may wait at a time.
pub const MAX_OPEN_STEPS: usize = 4096;
/// Longest string in a HELLO or WELCOME.
pub const MAX_HELLO_STRING: usize = 512;
/// Longest reason in REFUSE and GOODBYE.
pub const MAX_REASON: usize = 1024;

/// A block takes no further control frames beyond this many bytes …
pub const CONTROL_SOFT: usize = 256 << 10;
/// … and no further bulk bytes beyond this many, so that small frames overtake large tensors …
pub const BULK_SOFT: u64 = 4 << 20;
/// … and consists of at most this many segments.
pub const MAX_SEGMENTS: usize = 512;
/// At most this many targets in one receive plan.
pub const MAX_TARGETS: usize = 512;
/// A payload with at most this many bulk bytes may overtake larger ones …
pub const EXPRESS_MAX: u64 = 256 << 10;
/// … as long as the larger ones get the rest of `BULK_SOFT` in each block.
pub const EXPRESS_SHARE: u64 = 3 << 20;
/// A block with fewer bulk bytes than this is not lent: sending them costs less than what has to be said about a loan.
pub const LEND_MIN: u64 = 128 << 10;
/// Blocks that are lent at a time; beyond that, bytes are sent.
pub const MOST_LOANS: usize = 64;
/// Beyond this many encoded but unsent bytes, payloads wait where they lie instead of being copied, and a server stops
/// reading requests.
pub const OUTGOING_HIGH_WATER: usize = 8 << 20;

/// What one side lets the other do. Exchanged in HELLO and WELCOME; the sender obeys, the receiver enforces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Rendezvous requests without an answer.
    pub max_recvs: u32,
    /// Calls without an answer.
    pub max_calls: u32,
    /// Payload bytes of calls without an answer. One call alone may exceed it.
    pub max_call_bytes: u64,
    /// Interned key prefixes …
    pub max_keys: u32,
    /// … and their bytes.
    pub max_key_bytes: u32,
    /// One payload, all parts together.
    pub max_payload: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_recvs: 1 << 18,
            max_calls: 1 << 14,
            max_call_bytes: 256 << 20,
            max_keys: 1 << 16,
            max_key_bytes: 16 << 20,
            max_payload: 64 << 30,
        }
    }
}

impl Limits {
    /// The smallest values that a connection can work with. What is smaller is a mistake of whoever set it.
    pub fn is_usable(&self) -> bool {
        self.max_recvs >= 1
            && self.max_calls >= 1
            && self.max_keys >= 1
            && self.max_key_bytes as usize >= MAX_KEY
            && self.max_payload >= 1
    }
}
