//! Counters of one connection.

/// Totals since the connection began. `payload` bytes are tensor bytes; `copied` are those of them that travelled
/// inline and were therefore copied once in user space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    pub blocks_in: u64,
    pub blocks_out: u64,
    pub bytes_in: u64,
    pub bytes_out: u64,
    pub payload_in: u64,
    pub payload_out: u64,
    pub copied_in: u64,
    pub copied_out: u64,
    /// Payload bytes that the peer copies from this process's memory, and the reverse.
    pub lent: u64,
    pub borrowed: u64,
    pub calls: u64,
    pub replies: u64,
    pub pings_sent: u64,
    pub keys: u64,
    pub key_resets: u64,
}
