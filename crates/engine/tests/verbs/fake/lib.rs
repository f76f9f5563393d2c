//! A simulated libibverbs for tests: reliable connected queue pairs between processes of one host, over unix datagram
//! sockets, with faults on demand.
//!
//! It enforces the rules of real devices: keys are checked, messages need a posted buffer, numbers must match on both
//! sides, a failed queue pair flushes its work requests, events must be acknowledged. `FAKE_VERBS` in the environment,
//! or [`fake_verbs_device`], creates devices: `name:word,word,…;name…`, where a word is
//!
//! * `CALL@N=ERRNO`: the Nth call fails (`reg_mr@2=12`); `@N+`: all later ones too. Calls: open_device, query_port,
//!   create_comp_channel, alloc_pd, reg_mr, create_cq, create_qp, rtr, rts, post_send, post_recv
//! * `send@N=STATUS`, `read@N=STATUS`: the Nth such work request completes with this status, and the queue pair fails
//! * `lost@N`: the Nth READ is never answered and never times out (like soft-RoCE with 7 retries)
//! * `cq_err@N`, `fatal@N`: at the Nth work request, the completion queue or the device reports a failure
//! * `down`, `nogid`, `unreachable`, `mtu=CODE`, `gid=ADDRESS`
//! * `want-pkey=N`, `want-sl=N`, `want-class=N`, `want-mtu=CODE`, `want-timeout=N`, `want-retries=N`: no queue pair
//!   works with other attributes
//! * `memlock`: registrations count against the process's RLIMIT_MEMLOCK, as they do without CAP_IPC_LOCK
//!
//! No device supports remote writes or atomics, and none can be opened before `ibv_fork_init`.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    clippy::print_stderr,
    reason = "a test may panic, and its numbers are small"
)]
#![allow(clippy::missing_safety_doc, reason = "the C library documents them")]
#![allow(clippy::undocumented_unsafe_blocks, reason = "handles come from this library, as in C")]
#![allow(dead_code, reason = "the interface is shared with its user")]

#[path = "../../../../net/src/transport/verbs/abi.rs"]
mod abi;
mod device;
mod faults;
mod machine;
mod objects;
mod queue;
mod wire;
