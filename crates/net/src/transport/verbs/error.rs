//! RDMA errors on this host or on the path to a peer. Each message says where to look.

use std::io;

use super::abi;

#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    #[error(
        "RDMA: {library} cannot be loaded ({reason}): install libibverbs (Debian: libibverbs1 and ibverbs-providers)"
    )]
    Library { library: String, reason: String },
    #[error("RDMA: {library} has no {symbol}: it is not libibverbs, or older than rdma-core 17")]
    Symbol { library: String, symbol: &'static str },
    #[error("RDMA: the list of devices cannot be read ({0}): are the kernel modules ib_core and ib_uverbs loaded?")]
    List(io::Error),
    #[error(
        "RDMA: this host has no RDMA device: see the command ibv_devices; a container needs /dev/infiniband and the device's network name space"
    )]
    NoDevice,
    #[error("RDMA: there is no device {wanted} (RDMA_DEVICE), only {found}")]
    UnknownDevice { wanted: String, found: String },
    #[error("RDMA: device {device} cannot be opened ({source}): may this user open /dev/infiniband/uverbs*?")]
    Open { device: String, source: io::Error },
    #[error("RDMA: {device} cannot be asked for {what}: {source}")]
    Query { device: String, what: &'static str, source: io::Error },
    #[error("RDMA: {device} has {ports} ports, there is no port {wanted} (RDMA_DEVICE_PORT)")]
    UnknownPort { device: String, wanted: u8, ports: u8 },
    #[error(
        "RDMA: port {port} of {device} is not active (state {state}): is the link up, and on InfiniBand a subnet manager running?"
    )]
    PortDown { device: String, port: u8, state: &'static str },
    #[error("RDMA: no device has an active port ({seen}): is the link up, and on InfiniBand a subnet manager running?")]
    NoActivePort { seen: String },
    #[error("RDMA: port {port} of {device} has no GID {index} (RDMA_GID_INDEX); starctl doctor lists them")]
    UnknownGid { device: String, port: u8, index: u32 },
    #[error(
        "RDMA: port {port} of {device} has no RoCE v2 GID: give its network interface an IP address, or set RDMA_GID_INDEX"
    )]
    NoGid { device: String, port: u8 },
    #[error(
        "RDMA: {device} got no {what} ({source}): the limit of locked memory is {memlock} (ulimit -l, LimitMEMLOCK=, or the container's memlock)"
    )]
    Memory { device: String, what: &'static str, memlock: String, source: io::Error },
    #[error("RDMA: no {mib} MiB of addresses for tensors ({source}): see STARWIRE_VERBS_ARENA and ulimit -v")]
    Arena { mib: u64, source: io::Error },
    #[error("RDMA: {device} got no {what}: {source}")]
    Resource { device: String, what: &'static str, source: io::Error },
    #[error("RDMA: the queue pair cannot {what} ({source}): can {device} and the peer's device reach each other?")]
    Connect { device: String, what: &'static str, source: io::Error },
    #[error("RDMA: the peer's address is not usable: {0}")]
    PeerEndpoint(&'static str),
    #[error("RDMA: {operation} failed: {}", explain(*.status))]
    Completion { operation: &'static str, status: i32 },
    #[error("RDMA: the peer broke the rules: {0}")]
    Peer(&'static str),
    #[error("RDMA: the peer closed the connection before it took all that was sent")]
    Gone,
    #[error("RDMA: {device}: {what}")]
    Event { device: String, what: &'static str },
    #[error("RDMA: the queue pair does not take {what}: {source}")]
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
        abi::WC_LOC_LEN_ERR => "a message was longer than the buffer for it (LOC_LEN_ERR)",
        abi::WC_LOC_PROT_ERR => "the device may not touch this process's buffer (LOC_PROT_ERR)",
        abi::WC_WR_FLUSH_ERR => "the queue pair had failed before (WR_FLUSH_ERR)",
        abi::WC_REM_INV_REQ_ERR => "the peer's device did not accept the request (REM_INV_REQ_ERR)",
        abi::WC_REM_ACCESS_ERR => {
            "the peer does not allow access to that memory, or no longer, because it ends (REM_ACCESS_ERR)"
        }
        abi::WC_REM_OP_ERR => "the peer's device could not do it (REM_OP_ERR)",
        abi::WC_RETRY_EXC_ERR => {
            "the peer's device does not answer (RETRY_EXC_ERR): the peer is gone, or the network drops RDMA (RoCE v2 is UDP port 4791; MTU, VLAN and GID must fit)"
        }
        abi::WC_RNR_RETRY_EXC_ERR => "the peer has no buffer for it (RNR_RETRY_EXC_ERR)",
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
        assert!(error.contains("mlx5_0 got no queue pair") && error.contains("ulimit -l"), "{error}");
        let error = VerbsError::lacks("mlx5_0", "queue pair", io::Error::from_raw_os_error(libc::EINVAL)).to_string();
        assert!(!error.contains("ulimit"), "{error}");
    }
}
