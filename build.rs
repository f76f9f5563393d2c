//! Two things happen before the crate itself is compiled:
//!
//! * `proto/` becomes Rust code (always; needs no protoc);
//! * with the feature `tensorflow`, `cc/` is compiled against an installed TensorFlow and handed to the linker of
//!   `libstarwire.so`.

#[path = "build/control.rs"]
mod control;
#[path = "build/elf.rs"]
mod elf;
#[path = "build/shim.rs"]
mod shim;
#[path = "build/tensorflow.rs"]
mod tensorflow;

use std::process::ExitCode;

fn main() -> ExitCode {
    for file in ["build.rs", "build"] {
        println!("cargo::rerun-if-changed={file}");
    }
    let mut result = control::generate_control_service().map_err(|error| format!("proto/: {error}"));
    if result.is_ok() && std::env::var_os("CARGO_FEATURE_TENSORFLOW").is_some() {
        result = shim::build();
    }
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            // The whole reason, with the compiler's output, is shown when the script fails.
            eprintln!("{reason}");
            for line in reason.lines().take(1) {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}
