//! Every bound of the protocol. A number from the wire is compared with one of these before anything is allocated or
//! indexed.

/// A limit that other implementations have to know.
#[derive(Clone, Copy, Debug)]
pub struct Limit {
    pub name: &'static str,
    pub value: u64,
    /// What it limits, in Markdown.
    pub of: &'static str,
}

macro_rules! limits {
    ($($(#[doc = $of:literal])+ $name:ident: $type:ty = $value:expr;)+) => {
        $($(#[doc = $of])+ pub const $name: $type = $value;)+

        /// The limits in `docs/protocol.md`, whose table is generated from them.
        pub const LIMITS: &[Limit] =
            &[$(Limit { name: stringify!($name), value: $name as u64, of: concat!($($of),+) }),+];
    };
}

limits! {
    /// bytes of a block's header
    HEADER: usize = 32;
    /// bytes in front of bulk bytes, at least
    FIRST_READ: usize = 1024;
    /// bytes of a control section
    MAX_CONTROL: usize = 4 << 20;
    /// the same before the handshake is done
    MAX_HANDSHAKE_CONTROL: usize = 4096;
    /// bytes of a challenge
    CHALLENGE: usize = 32;
    /// bytes of the code that authenticates a block, at the end of its control section
    TAG: usize = 16;
    /// bulk bytes of a block, lent ones as well
    MAX_BULK: u64 = 16 << 20;
    /// bytes of metadata of a CALL or REPLY, and of a HELLO or WELCOME
    MAX_META: usize = 1 << 20;
    /// bytes of an error message, and of an error's details; a sender truncates the message and drops the details
    MAX_MESSAGE: usize = 64 << 10;
    /// bytes from which on a part is bulk
    BULK_MIN: u64 = 8 << 10;
    /// bytes of all inline parts of a frame, with padding
    MAX_INLINE: usize = 1 << 20;
    /// parts of a payload
    MAX_PARTS: usize = 1 << 16;
    /// bytes of a key prefix
    MAX_KEY: usize = 4096;
    /// steps whose tensors a client waits for at a time; RECVs of further ones are answered with `ResourceExhausted`
    MAX_OPEN_STEPS: usize = 4096;
    /// bytes of a field of HELLO or WELCOME
    MAX_HELLO_STRING: usize = 512;
    /// bytes of the reason in REFUSE, GOODBYE and MOVE; a sender truncates it
    MAX_REASON: usize = 1024;
    /// pieces of a loan
    MAX_SEGMENTS: usize = 512;
    /// blocks that are lent at a time
    MOST_LOANS: usize = 64;
}

// Limits that only the sender needs. A block has at most `MAX_SEGMENTS` segments, lent or not.

/// A header and the frames of one block have at most this many bytes, so that there is room for a code.
pub const MAX_FRAMES: usize = HEADER + MAX_CONTROL - TAG;
/// A block takes no further control frames beyond this many bytes …
pub const CONTROL_SOFT: usize = 256 << 10;
/// … and no further bulk bytes beyond this many, so that small frames overtake large tensors.
pub const BULK_SOFT: u64 = 4 << 20;
/// Most receive targets.
pub const MAX_TARGETS: usize = 512;
/// A payload with at most this many bulk bytes may overtake larger ones …
pub const EXPRESS_MAX: u64 = 256 << 10;
/// … as long as the larger ones get the rest of `BULK_SOFT` in each block.
pub const EXPRESS_SHARE: u64 = 3 << 20;
/// A block with fewer bulk bytes is sent, which costs less than a loan.
pub const LEND_MIN: u64 = 128 << 10;
/// Beyond this many encoded but unsent bytes, payloads stay in place instead of being copied, and a server stops
/// reading requests.
pub const OUTGOING_HIGH_WATER: usize = 8 << 20;
/// Beyond this many bytes of replies' payloads that wait to be sent, a server stops reading requests, too …
pub const REPLIES_HIGH_WATER: u64 = 256 << 20;
/// … but beyond this many where it lends them: the peer returns loans on the same connection.
pub const LENDER_HIGH_WATER: u64 = 1 << 30;

/// The table of limits in `docs/protocol.md`.
pub fn markdown_table() -> String {
    let rows = LIMITS.iter().map(|limit| format!("| `{}` | {} | {} |\n", limit.name, limit.value, limit.of.trim()));
    format!("| name | value | of |\n|---|---|---|\n{}", rows.collect::<String>())
}

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
    /// Whether a connection can work with these values.
    pub fn is_usable(&self) -> bool {
        self.max_recvs >= 1
            && self.max_calls >= 1
            && self.max_keys >= 1
            && self.max_key_bytes as usize >= MAX_KEY
            && self.max_payload >= 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_limit() {
        let table = markdown_table();
        let start = "| name | value | of |\n|---|---|---|\n| `HEADER` | 32 | bytes of a block's header |\n";
        assert!(table.starts_with(start), "{table}");
        assert_eq!(table.lines().count(), 2 + LIMITS.len());
    }
}
