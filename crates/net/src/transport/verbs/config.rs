//! The configuration of RDMA.

/// The transport for the data of TCP connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransportChoice {
    Tcp,
    Verbs,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerbsConfig {
    pub transport: TransportChoice,
    /// Falls back to TCP, with a line in the log, if RDMA does not work; else that is an error.
    pub fallback: bool,
    /// Name or path of libibverbs.
    pub library: String,
    /// `None`: the first device with an active port.
    pub device: Option<String>,
    pub port: Option<u8>,
    pub gid_index: Option<u32>,
    pub pkey_index: u16,
    /// The number of work requests that a queue pair takes.
    pub queue_depth: u32,
    /// 4.096 µs · 2^n until a packet is sent again.
    pub timeout: u8,
    pub retry_count: u8,
    pub service_level: u8,
    /// In bytes; `None`: the port's.
    pub mtu: Option<u32>,
    pub traffic_class: u8,
    /// The peer reads pieces of a payload that are at least this long straight from their memory; shorter ones are
    /// copied into messages.
    pub direct_min: u64,
    /// Bytes of message buffers for each direction of a connection.
    pub buffer_bytes: u64,
    /// Size of the arena for tensors whose registrations are kept; 0: none.
    pub arena_bytes: u64,
}
