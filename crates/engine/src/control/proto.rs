//! Generated from `proto/` at build time (`build.rs`).
#![allow(missing_docs, clippy::all)]

pub mod health {
    tonic::include_proto!("grpc.health.v1");
}

pub mod starwire {
    tonic::include_proto!("starwire.control.v1");
}
