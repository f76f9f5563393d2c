//! Makes the Rust types and services of the control plane from `proto/` (`make proto`). The code is in the repository: what
//! makes it is a third of all crates that a build would need. `tests/tidy.rs` notices code that is older than `proto/`.

use std::error::Error;
use std::fs;
use std::path::Path;

const PROTOS: [(&str, &str); 2] =
    [("grpc/health/v1/health.proto", "grpc.health.v1"), ("starwire/control/v1/control.proto", "starwire.control.v1")];

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (from, to) = (root.join("proto"), root.join("crates/engine/src/control/generated"));
    let descriptors = protox::compile(PROTOS.map(|(proto, _)| proto), [&from])?;
    tonic_prost_build::configure().out_dir(&to).compile_fds(descriptors)?;
    for (proto, package) in PROTOS {
        let made = to.join(format!("{package}.rs"));
        let checksum = crc32c::crc32c(&fs::read(from.join(proto))?);
        let head = format!("// From proto/{proto}, whose crc32c is {checksum:08x}, by `make proto`.\n");
        fs::write(&made, head + &fs::read_to_string(&made)?)?;
    }
    Ok(())
}
