//! What the executor is built from. A model checker puts its own kinds in their place.

pub use std::sync::Arc;
pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
pub use std::thread::yield_now;
