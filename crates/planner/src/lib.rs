//! Pure graph algorithms: what moves between tasks, when, and together with what. No TensorFlow, no clock, no
//! randomness: the same graph always gives the same plan.
//!
//! * [`ops`]: the op table, which describes TensorFlow's operations.
//! * [`graph`]: the abstract graph that all planners work on.
//! * [`flow`]: loop frames, and an order in which the graph can run.
//! * [`predicates`]: the conditions under which a node runs.
//! * [`schedule`]: when things happen, as far as the graph tells.
//! * [`loops`]: loops whose iterations follow each other.
//! * [`unordered`]: which reads and updates of a variable are to follow each other although no edge says so.
//! * [`fuse`]: which tensors cross from task to task together (tensor_fuse).
//! * [`star`]: turns the parameter servers' part of a graph into calls; with [`roles`] (which tasks are servers),
//!   [`classes`] (which nodes could share a call), [`roots`] (which variable is behind a reference), [`placement`]
//!   (what becomes of each node), [`aliases`] (which values are a variable's memory), [`rounds`] (when), [`reads`]
//!   (which reads of variables can be deferred) and [`parts`] (which calls carry too much).

#![cfg_attr(
    test,
    allow(
        clippy::unwrap_used,
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        clippy::cast_sign_loss,
        reason = "a test may panic, and its numbers are small"
    )
)]
#![forbid(unsafe_code)]

pub mod aliases;
pub mod classes;
pub mod flow;
pub mod fuse;
pub mod graph;
pub mod loops;
pub mod ops;
pub mod parts;
pub mod placement;
pub mod predicates;
pub mod reads;
pub mod roles;
pub mod roots;
pub mod rounds;
pub mod schedule;
mod sets;
pub mod star;
mod star_text;
pub mod unordered;
