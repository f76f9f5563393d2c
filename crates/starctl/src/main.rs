//! starctl: looks at a machine, at running servers and at graphs, and writes endpoint maps.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a command prints")]
#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small"))]
#![forbid(unsafe_code)]

mod args;
mod bench;
mod cluster;
mod completions;
mod doctor;
mod endpoint_map;
mod health;
mod plan;
mod probe;
mod remote;
mod secret;
mod secure;
mod targets;
mod top;

use std::process::ExitCode;

use args::{Command, Failure, Parsed};

const COMMANDS: [Command; 8] = [
    doctor::COMMAND,
    top::COMMAND,
    health::COMMAND,
    endpoint_map::COMMAND,
    secret::COMMAND,
    plan::COMMAND,
    bench::COMMAND,
    completions::COMMAND,
];

fn main() -> ExitCode {
    let arguments: Vec<String> = match std::env::args_os().skip(1).map(std::ffi::OsString::into_string).collect() {
        Ok(arguments) => arguments,
        Err(raw) => return complain(&format!("the argument {raw:?} is not UTF-8 text")),
    };
    let Some((name, rest)) = arguments.split_first() else {
        print!("{}", overview());
        return ExitCode::from(2);
    };
    match name.as_str() {
        "--help" | "-h" | "help" => {
            print!("{}", overview());
            return ExitCode::SUCCESS;
        }
        "--version" | "-V" => {
            println!("starctl {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        _ => {}
    }
    let Some(command) = COMMANDS.iter().find(|command| command.name == name) else {
        let names: Vec<&str> = COMMANDS.iter().map(|command| command.name).collect();
        return complain(&format!("unknown command {name:?}; known: {}", names.join(", ")));
    };
    let name = command.name;
    match args::parse(command, rest) {
        Ok(Parsed::Help) => {
            print!("{}", command.help());
            ExitCode::SUCCESS
        }
        Ok(Parsed::Run(args)) => match (command.run)(&args) {
            Ok(code) => code,
            Err(Failure::Usage(message)) => complain(&format!("{name}: {message}\ntry: starctl {name} --help")),
            Err(Failure::Failed(message)) => {
                eprintln!("starctl {name}: {message}");
                ExitCode::FAILURE
            }
        },
        Err(message) => complain(&format!("{name}: {message}\ntry: starctl {name} --help")),
    }
}

fn overview() -> String {
    let mut text = String::from("usage: starctl COMMAND [OPTIONS]\n\n");
    for command in &COMMANDS {
        text += &format!("  {:<14}{}\n", command.name, command.about);
    }
    text + "\n`starctl COMMAND --help` describes a command.\nExit status: 0 success, 1 failure, 2 wrong command line.\n"
}

fn complain(message: &str) -> ExitCode {
    eprintln!("starctl: {message}");
    ExitCode::from(2)
}
