//! starctl: looks at a machine, at running servers and at graphs, and writes endpoint maps.

#![cfg_attr(test, allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small"))]
#![forbid(unsafe_code)]

mod bench;
mod cluster;
mod doctor;
mod endpoint_map;
mod failure;
mod graph_def;
mod health;
mod output;
mod plan;
mod remote;
mod secret;
mod state;
mod targets;
mod tls;
mod top;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Looks at machines, running servers and graphs
#[derive(Parser)]
#[command(version, after_help = "Exit status: 0 success, 1 failure, 2 wrong command line.")]
struct Starctl {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Doctor(doctor::Args),
    Top(top::Args),
    Health(health::Args),
    EndpointMap(endpoint_map::Args),
    Secret(secret::Args),
    Plan(plan::Args),
    #[command(subcommand)]
    State(state::Command),
    Bench(bench::Args),
    /// Print a script that lets a shell complete commands and options
    #[command(after_help = "\
  starctl completions bash >/etc/bash_completion.d/starctl
  starctl completions zsh >\"${fpath[1]}/_starctl\"
  starctl completions fish >~/.config/fish/completions/starctl.fish")]
    Completions {
        shell: clap_complete::Shell,
    },
}

fn main() -> ExitCode {
    let result = match Starctl::parse().command {
        Command::Doctor(args) => doctor::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Health(args) => health::run(&args),
        Command::EndpointMap(args) => endpoint_map::run(&args),
        Command::Secret(args) => secret::run(&args),
        Command::Plan(args) => plan::run(&args),
        Command::State(command) => state::run(&command),
        Command::Bench(args) => bench::run(&args),
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Starctl::command(), "starctl", &mut script);
            output::print(String::from_utf8_lossy(&script)).map(|()| ExitCode::SUCCESS)
        }
    };
    result.unwrap_or_else(|failure| {
        let Some((message, status)) = failure.report() else { return ExitCode::SUCCESS };
        output::complain(format_args!("error: {message}"));
        ExitCode::from(status)
    })
}
