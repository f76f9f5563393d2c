//! The lock-free executor: runs a sub-graph's kernels, which it knows only as numbers.
//!
//! * [`plan`]: the sub-graph, compiled once into arrays, checked, immutable, shared by all runs; [`lives`] says when
//!   which value goes.
//! * [`run`]: one run. Three ways through a plan, chosen per run: *straight* (a fixed order, no counters), *solo*
//!   (pending counts, one thread at a time: asynchronous kernels, dead values), *crew* (atomic pending counts, several
//!   threads: kernels that are worth another core).
//! * [`arena`]: what one run writes to; [`pool`]: where arenas rest between runs, per core.
//! * [`queue`]: ready work that any thread may take, and the lanes that threads take it in.
//! * [`report`]: who goes on after an asynchronous kernel.
//! * [`cost`]: what kernels were measured to take.
//!
//! A run takes no lock and allocates nothing (`crates/executor/tests/executor/` counts and looks). `docs/executor.md`
//! has the picture.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
pub mod arena;
pub mod cost;
pub mod lives;
pub mod plan;
#[allow(unsafe_code)]
pub mod pool;
pub mod queue;
pub mod report;
pub mod run;
pub mod sync;

pub use arena::RunRef;
pub use plan::{CONTROL, Edge, Node, Plan, PlanError, Task, kind};
pub use run::{Call, Executor, Helper, Kernels, Outcome, Run};
