//! The lock-free executor: runs a sub-graph's kernels, which it knows only by number.
//!
//! * [`plan`]: the sub-graph, compiled once into arrays, checked, immutable, shared by all runs; [`lives`] computes
//!   when each value is released.
//! * [`run`]: one run. Three modes, chosen per run: *straight* (a fixed order, no counters), *solo* (pending counts,
//!   one thread at a time: asynchronous kernels), *crew* (atomic pending counts, several threads: kernels that are
//!   worth another core).
//! * [`arena`]: the interface to the kernels, and the mutable state of one run; [`pool`]: keeps arenas between runs,
//!   per core.
//! * [`queue`]: ready work that any thread may take, and the lanes in which threads work.
//! * [`report`]: decides which thread continues after an asynchronous kernel.
//! * [`cost`]: measured costs of kernels.
//!
//! A run takes no lock and allocates nothing (tested in `crates/executor/tests/`). See `docs/executor.md`.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod arena;
mod compiled;
pub mod cost;
pub mod lives;
pub mod plan;
#[allow(unsafe_code)]
pub mod pool;
pub mod queue;
pub mod report;
pub mod run;
pub mod sync;

pub use arena::{Call, Helper, KernelResult, Kernels, RunRef};
pub use plan::{CONTROL, Edge, Node, Plan, PlanError, Task, kind};
pub use run::{Executor, Run};
