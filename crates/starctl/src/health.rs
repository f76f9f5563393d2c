//! `starctl health`: is a server there and serving?

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;
use starwire_engine::config::ProcessEnv;
use starwire_engine::control::proto::health::HealthCheckRequest;
use starwire_engine::control::proto::health::health_check_response::ServingStatus;
use starwire_engine::control::proto::health::health_client::HealthClient;

use crate::failure::Failure;
use crate::output::{say, unless_unread};
use crate::remote;
use crate::targets::{self, Servers, Target};

/// Check whether servers are serving
#[derive(clap::Args)]
#[command(after_help = format!("{}\nThe exit status is 0 only if all are SERVING.", targets::DETAILS))]
pub struct Args {
    #[command(flatten)]
    servers: Servers,
    /// Check one service instead of the whole server
    #[arg(long, value_name = "NAME", default_value = "", hide_default_value = true)]
    service: String,
    /// Time to wait for an answer
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = clap::value_parser!(u64).range(1..=600_000))]
    timeout_ms: u64,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let timeout = Duration::from_millis(args.timeout_ms);
    let targets = args.servers.targets(&ProcessEnv)?;
    let (mut all_serve, mut answers) = (true, Vec::new());
    for (target, checked) in targets.iter().zip(remote::block_on(check(&targets, &args.service, timeout))?) {
        let (status, reason) = match checked {
            Ok(status) => (status.as_str_name(), None),
            Err(error) => ("UNREACHABLE", Some(target.explain(&remote::explain(&error)))),
        };
        all_serve &= status == "SERVING";
        let address = &target.address;
        if args.json {
            answers.push(json!({"address": address.to_string(), "status": status, "reason": reason}));
        } else {
            let reason = reason.map_or_else(String::new, |reason| format!(" ({reason})"));
            unless_unread(say(format_args!("{address} {status}{reason}")))?;
        }
    }
    if args.json {
        unless_unread(say(format_args!("{:#}", serde_json::Value::from(answers))))?;
    }
    Ok(if all_serve { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Asks all servers at once: one that hangs must not hold up the others.
async fn check(
    targets: &[Target],
    service: &str,
    timeout: Duration,
) -> Result<Vec<Result<ServingStatus, tonic::Status>>, Failure> {
    let mut calls = Vec::new();
    for target in targets {
        let mut client = HealthClient::new(remote::channel(target.data.address(), timeout)?);
        let request = HealthCheckRequest { service: service.to_owned() };
        calls.push(tokio::spawn(async move { remote::within(timeout, client.check(request)).await }));
    }
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await?.map(|reply| reply.into_inner().status()));
    }
    Ok(answers)
}
