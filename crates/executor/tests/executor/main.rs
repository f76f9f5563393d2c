//! The executor without TensorFlow: random graphs against a reference interpreter, and a check of its sources.

#![allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small")]

mod graph;
mod locks;
mod order;
mod plans;
mod properties;
mod reference;
mod rig;
