//! Makes Rust types and services of the control plane from `proto/`, with protox: no protoc is needed.

use std::error::Error;
use std::path::Path;

const PROTOS: [&str; 2] = ["grpc/health/v1/health.proto", "starwire/control/v1/control.proto"];

fn main() -> Result<(), Box<dyn Error>> {
    let folder = Path::new("../../proto");
    for proto in PROTOS {
        println!("cargo::rerun-if-changed={}", folder.join(proto).display());
    }
    println!("cargo::rerun-if-changed=build.rs");
    let descriptors = protox::compile(PROTOS, [folder])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
