//! TensorFlow's gRPC between tasks, inside their connections.
//!
//! With a secret or TLS, nothing answers on a task's port without proof, and TensorFlow's gRPC clients cannot give one.
//! What they still do (the coordination service, contexts of eager execution) goes through the connection between the
//! tasks instead, whose ends know each other: a client of this process connects to a listener on 127.0.0.1
//! ([`client`]), and calls carry its bytes to the task, which connects to TensorFlow's server there ([`server`]).

mod client;
mod server;

pub use client::{Destination, TunnelListeners};
pub use server::TunnelServer;
