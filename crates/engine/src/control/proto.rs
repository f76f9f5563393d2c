//! Generated from `proto/` (`make proto`).
#![allow(missing_docs, clippy::all)]

pub mod health {
    include!("generated/grpc.health.v1.rs");
}

pub mod starwire {
    include!("generated/starwire.control.v1.rs");
}
