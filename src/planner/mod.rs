//! Pure graph algorithms: what is moved between tasks, when, and in whose company. No TensorFlow, no clock, no randomness: the same graph
//! gives the same plan.
//!
//! * [`graph`]: the abstract graph that all planners work on.
//! * [`flow`]: loop frames, and an order in which the graph can run.
//! * [`predicates`]: under which conditions a node runs.
//! * [`schedule`]: when things happen, as far as the graph tells.
//! * [`fuse`]: which tensors cross from task to task together (tensor_fuse).

pub mod flow;
pub mod fuse;
pub mod graph;
pub mod predicates;
pub mod schedule;
mod sets;

#[cfg(test)]
mod fuse_tests;
#[cfg(test)]
mod generate;
#[cfg(test)]
mod simulate;
