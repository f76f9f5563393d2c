//! The executor without TensorFlow: random graphs against a reference interpreter, and what its sources may not
//! contain.

mod graph;
mod locks;
mod plans;
mod properties;
mod reference;
mod rig;
