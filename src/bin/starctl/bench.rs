//! `starctl bench`
use crate::args::{Args, Command, Failure, Opt};
use std::process::ExitCode;
pub const COMMAND: Command = Command {
    name: "bench",
    about: "Measures.",
    positional: "",
    options: &[Opt { name: "--x", value: "", help: "" }],
    details: "",
    run,
};
fn run(_: &Args) -> Result<ExitCode, Failure> {
    Ok(ExitCode::SUCCESS)
}
