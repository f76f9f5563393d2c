//! A libibverbs without hardware, for tests: reliable connected queue pairs between processes of one host, over unix
//! datagram sockets, with faults on demand.
//!
//! It keeps the rules that code for real devices must keep: keys are checked, messages need a posted buffer, numbers
//! must fit on both sides, a failed queue pair flushes what is left, events must be acknowledged. `FAKE_VERBS` in the
//! environment, or [`fake_verbs_device`], makes devices: `name:word,word,…;name…`, where a word is
//!
//! * `CALL@N=ERRNO`: the Nth call fails (`reg_mr@2=12`); `@N+`: and all later ones. Calls: open_device, query_port,
//!   create_comp_channel, alloc_pd, reg_mr, create_cq, create_qp, rtr, rts, post_send, post_recv
//! * `send@N=STATUS`, `read@N=STATUS`: the Nth such work request completes with this status, and the queue pair has
//!   failed
//! * `lost@N`: the Nth READ is never answered, and never given up (as soft-RoCE does with 7 retries)
//! * `cq_err@N`, `fatal@N`: with the Nth work request the completion queue or the device reports that it is broken
//! * `down`, `nogid`, `unreachable`, `mtu=CODE`, `gid=ADDRESS`
//! * `want-pkey=N`, `want-sl=N`, `want-class=N`, `want-mtu=CODE`, `want-timeout=N`, `want-retries=N`: no queue pair
//!   gets on with other attributes
//! * `memlock`: what is registered counts against the process's RLIMIT_MEMLOCK, as the kernel does for users without
//!   CAP_IPC_LOCK
//!
//! No device takes remote writes or atomics, and none is opened before `ibv_fork_init`.

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
