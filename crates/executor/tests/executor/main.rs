//! The executor without TensorFlow: random graphs against a reference interpreter, and a check of its sources.

mod graph;
mod locks;
mod plans;
mod properties;
mod reference;
mod rig;
