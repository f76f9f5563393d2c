//! The control service on the data port: gRPC health, statistics, Prometheus' `/metrics`.

pub mod proto;
