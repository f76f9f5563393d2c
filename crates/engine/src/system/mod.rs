//! The engine's interface to the process and the kernel, apart from sockets.

pub mod environment;
pub mod exit;
pub mod fork;
pub mod peer_memory;
pub mod random;
pub mod slabs;
