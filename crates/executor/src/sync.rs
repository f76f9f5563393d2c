//! The executor's synchronization primitives. The model checker (loom) substitutes its own.

pub use std::sync::Arc;
pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
pub use std::thread::yield_now;
