//! What carries the calls of one simulated worker: a protocol. What is called is not its business.

use std::sync::Arc;

use bytes::Bytes;
use tokio::sync::mpsc::UnboundedSender;

use crate::tensor::Tensor;
use crate::wire::Malformed;

/// The way of one worker to its parameter server, and back: what ends or is asked is told to the worker's `Events`.
pub trait Link {
    /// Starts a method call; ends as `Event::Ended` with this token.
    fn call(&self, token: u64, name: &str, method: u16, request: Vec<u8>);
    /// Asks for a tensor; ends as `Event::Ended` with this token.
    fn pull(&self, token: u64, pull: Ask<'_>);
    /// Makes a star call, or registers its plan (docs/protocol.md): ends as `Event::Ended` with this token, a call of
    /// an unknown plan as `Event::Unknown`.
    fn star(&self, token: u64, request: StarRequest);
    /// Answers an `Event::Asked`.
    fn answer(&self, asker: u64, tensor: &Arc<Tensor>);
}

/// A request for a tensor in the two forms that protocols have for it.
pub struct Ask<'a> {
    pub step: u64,
    pub key: &'a str,
    /// A serialised `RecvTensorRequest`.
    pub request: &'a dyn Fn() -> Result<Vec<u8>, Malformed>,
    /// How long the tensor is.
    pub bytes: u64,
}

/// A method with metadata and several parts.
pub struct StarRequest {
    pub method: u16,
    pub meta: Vec<u8>,
    pub parts: Arc<[Bytes]>,
    /// How long the answer is.
    pub bytes: u64,
}

#[derive(Debug)]
pub enum Event {
    Ended {
        token: u64,
        result: Result<Bytes, String>,
    },
    /// The parameter server does not know the plan of this call, and has done nothing.
    Unknown {
        token: u64,
    },
    /// The parameter server wants a tensor.
    Asked {
        step: u64,
        edge: String,
        asker: u64,
    },
    /// The connection is gone.
    Lost(String),
}

pub type Events = UnboundedSender<Event>;

/// The name of the tensor in a rendezvous key: `source;incarnation;destination;name`, with or without
/// `;frame:iteration`.
pub fn edge_of(key: &str) -> Option<&str> {
    key.split(';').nth(3)
}
