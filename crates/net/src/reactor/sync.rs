//! What the mailbox is built from. A model checker puts its own kinds in their place.

pub use crossbeam_queue::SegQueue as Queue;
pub use std::sync::Arc;
pub use std::sync::atomic::{AtomicBool, Ordering, fence};
