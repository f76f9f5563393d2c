//! `starctl health`: is a server there and serving?

use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;
use starwire_engine::control::proto::health::HealthCheckRequest;
use starwire_engine::control::proto::health::health_client::HealthClient;

use crate::args::{Args, Command, Failure, JSON, Opt};
use crate::remote;
use crate::targets::{self, Target};

pub const COMMAND: Command = Command {
    name: "health",
    about: "Checks whether servers are serving.",
    positional: "[ADDRESS...]",
    options: &[
        targets::CLUSTER,
        Opt { name: "--service", value: "NAME", help: "check one service instead of the whole server" },
        Opt { name: "--timeout-ms", value: "N", help: "time to wait for an answer (2000)" },
        JSON,
    ],
    details: "\
ADDRESS is host:port of a server, as in the ClusterSpec. The endpoint map, and STARWIRE_PORTS=two with
STARWIRE_PORT_OFFSET, tell where its data port is, as for a server; set them as there.
Without an ADDRESS: all tasks of --cluster, or of $TF_CONFIG. The exit status is 0 only if all are SERVING.
",
    run,
};

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let timeout = Duration::from_millis(args.number("--timeout-ms", 2000, 1, 600_000)?);
    let service = args.get("--service").unwrap_or_default();
    let targets = targets::targets(args)?;
    let runtime = remote::runtime()?;
    let (mut all_well, mut answers) = (true, Vec::new());
    for Target { address, data } in &targets {
        let asked = runtime.block_on(async {
            let channel = remote::channel(data, timeout).map_err(|e| e.to_string())?;
            let request = HealthCheckRequest { service: service.to_owned() };
            HealthClient::new(channel).check(request).await.map_err(|status| remote::explain(&status))
        });
        let (status, reason) = match asked {
            Ok(reply) => (reply.into_inner().status().as_str_name(), None),
            Err(reason) => ("UNREACHABLE", Some(reason)),
        };
        all_well &= status == "SERVING";
        if args.has(JSON.name) {
            answers.push(json!({"address": address.to_string(), "status": status, "reason": reason}));
        } else {
            println!("{address} {status}{}", reason.map_or_else(String::new, |reason| format!(" ({reason})")));
        }
    }
    if args.has(JSON.name) {
        println!("{:#}", serde_json::Value::from(answers));
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
