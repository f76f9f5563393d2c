//! RDMA errors on this host or on the path to a peer. Each message says where to look.

use std::io;

use super::abi;

#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    #[error("RDMA: cannot load {library} ({reason}): install libibverbs (Debian: libibverbs1 and ibverbs-providers)")]
    Library { library: String, reason: String },
    #[error("RDMA: {library} has no {symbol}: it is not libibverbs, or older than rdma-core 17")]
    Symbol { library: String, symbol: &'static str },
    #[error("RDMA: cannot list devices ({0}): load the kernel modules ib_core and ib_uverbs")]
    List(io::Error),
    #[error(
        "RDMA: this host has no RDMA device: check ibv_devices; a container needs /dev/infiniband and the device's network namespace"
    )]
    NoDevice,
    #[error("RDMA: no device {wanted} (RDMA_DEVICE), only {found}")]
    UnknownDevice { wanted: String, found: String },
    #[error("RDMA: cannot open device {device} ({source}): check the permissions of /dev/infiniband/uverbs*")]
    Open { device: String, source: io::Error },
    #[error("RDMA: {device}: cannot query {what}: {source}")]
    Query { device: String, what: &'static str, source: io::Error },
    #[error("RDMA: {device} has no port {wanted} (RDMA_DEVICE_PORT), only {ports}")]
    UnknownPort { device: String, wanted: u8, ports: u8 },
    #[error(
        "RDMA: port {port} of {device} is not active (state {state}): check the link and, on InfiniBand, the subnet manager"
    )]
    PortDown { device: String, port: u8, state: &'static str },
    #[error("RDMA: no device has an active port ({seen}): check the link and, on InfiniBand, the subnet manager")]
    NoActivePort { seen: String },
    #[error("RDMA: port {port} of {device} has no GID {index} (RDMA_GID_INDEX); starctl doctor lists its GIDs")]
    UnknownGid { device: String, port: u8, index: u32 },
    #[error(
        "RDMA: port {port} of {device} has no RoCE v2 GID: assign an IP address to its network interface, or set RDMA_GID_INDEX"
    )]
    NoGid { device: String, port: u8 },
    #[error(
        "RDMA: {device}: cannot create {what} ({source}): raise the locked-memory limit of {memlock} (ulimit -l, LimitMEMLOCK=, or the container's memlock)"
    )]
    Memory { device: String, what: &'static str, memlock: String, source: io::Error },
    #[error(
        "RDMA: cannot reserve {mib} MiB of addresses for tensors ({source}): lower STARWIRE_VERBS_ARENA or raise ulimit -v"
    )]
    Arena { mib: u64, source: io::Error },
    #[error("RDMA: {device}: cannot create {what}: {source}")]
    Resource { device: String, what: &'static str, source: io::Error },
    #[error(
        "RDMA: the queue pair cannot {what} ({source}): check that {device} and the peer's device can reach each other"
    )]
    Connect { device: String, what: &'static str, source: io::Error },
    #[error("RDMA: unusable peer address: {0}")]
    PeerEndpoint(&'static str),
    #[error("RDMA: {operation} failed: {}", explain(*.status))]
    Completion { operation: &'static str, status: i32 },
    #[error("RDMA: protocol violation by the peer: {0}")]
    Peer(&'static str),
    #[error("RDMA: the peer closed the connection before it received everything that was sent")]
    Gone,
    #[error("RDMA: {device}: {what}")]
    Event { device: String, what: &'static str },
    #[error("RDMA: the queue pair rejected {what}: {source}")]
    Post { what: &'static str, source: io::Error },
}

impl VerbsError {
    /// Lack of memory has one common reason, which the message names.
    pub(super) fn lacks(device: &str, what: &'static str, source: io::Error) -> Self {
        let device = device.to_owned();
        match source.raw_os_error() {
            Some(libc::ENOMEM | libc::EAGAIN | libc::EPERM) => {
                VerbsError::Memory { device, what, memlock: memlock_text(), source }
            }
            _ => VerbsError::Resource { device, what, source },
        }
    }
}

impl From<VerbsError> for io::Error {
    fn from(error: VerbsError) -> Self {
        io::Error::other(error)
    }
}

/// The soft limit of locked memory in bytes; `None`: unlimited, or unknown.
pub fn memlock() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is writable.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

fn memlock_text() -> String {
    memlock().map_or_else(|| "unlimited".to_owned(), |bytes| format!("{} KiB", bytes >> 10))
}

/// Explains a completion's status to an operator.
fn explain(status: i32) -> &'static str {
    match status {
        abi::WC_LOC_LEN_ERR => "a message exceeded its buffer (LOC_LEN_ERR)",
        abi::WC_LOC_PROT_ERR => "the device may not access this process's buffer (LOC_PROT_ERR)",
        abi::WC_WR_FLUSH_ERR => "the queue pair had already failed (WR_FLUSH_ERR)",
        abi::WC_REM_INV_REQ_ERR => "the peer's device rejected the request (REM_INV_REQ_ERR)",
        abi::WC_REM_ACCESS_ERR => {
            "the peer does not allow access to that memory, or no longer does because it is stopping (REM_ACCESS_ERR)"
        }
        abi::WC_REM_OP_ERR => "the peer's device could not perform the operation (REM_OP_ERR)",
        abi::WC_RETRY_EXC_ERR => {
            "the peer's device does not answer (RETRY_EXC_ERR): the peer is gone, or the network drops RDMA (RoCE v2 uses UDP port 4791; MTU, VLAN and GID must match)"
        }
        abi::WC_RNR_RETRY_EXC_ERR => "the peer has no receive buffer (RNR_RETRY_EXC_ERR)",
        abi::WC_FATAL_ERR => "the device failed (FATAL_ERR)",
        _ => "see ibv_wc_status_str for this status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lack_of_memory_names_the_limit() {
        let error = VerbsError::lacks("mlx5_0", "queue pair", io::Error::from_raw_os_error(libc::ENOMEM)).to_string();
        assert!(error.contains("mlx5_0: cannot create queue pair") && error.contains("ulimit -l"), "{error}");
        let error = VerbsError::lacks("mlx5_0", "queue pair", io::Error::from_raw_os_error(libc::EINVAL)).to_string();
        assert!(!error.contains("ulimit"), "{error}");
    }
}
