//! Rust types and services of the control plane from `proto/`, with protox: no protoc is needed.

use std::error::Error;

const PROTOS: [&str; 2] = ["grpc/health/v1/health.proto", "starwire/control/v1/control.proto"];

pub fn generate_control_service() -> Result<(), Box<dyn Error>> {
    for proto in PROTOS {
        println!("cargo::rerun-if-changed=proto/{proto}");
    }
    println!("cargo::rerun-if-changed=build/control.rs");
    let descriptors = protox::compile(PROTOS, ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
