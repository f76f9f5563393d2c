//! With the feature `tensorflow`, compiles `cc/` against an installed TensorFlow and passes it to the linker of
//! `libstarwire.so`.

#![allow(clippy::print_stderr, reason = "cargo shows it")]

#[path = "build/elf.rs"]
mod elf;
#[path = "build/headers.rs"]
mod headers;
#[path = "build/shim.rs"]
mod shim;
#[path = "build/tensorflow.rs"]
mod tensorflow;

use std::process::ExitCode;

fn main() -> ExitCode {
    for file in ["build.rs", "build"] {
        println!("cargo::rerun-if-changed={file}");
    }
    if std::env::var_os("CARGO_FEATURE_TENSORFLOW").is_none() {
        return ExitCode::SUCCESS;
    }
    match shim::build() {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            // cargo shows stderr, with the full compiler output, when the script fails.
            eprintln!("{reason}");
            for line in reason.lines().take(1) {
                println!("cargo::error={line}");
            }
            ExitCode::FAILURE
        }
    }
}
