//! The mailbox's synchronization primitives. The model checker (loom) substitutes its own.

pub use crossbeam_queue::SegQueue as Queue;
pub use std::sync::Arc;
pub use std::sync::atomic::{AtomicBool, Ordering, fence};
