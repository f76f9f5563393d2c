//! `starctl health`: is a server there and serving?

use std::process::ExitCode;
use std::time::Duration;

use starwire_engine::control::proto::health::HealthCheckRequest;
use starwire_engine::control::proto::health::health_client::HealthClient;

use crate::args::{Args, Command, Failure, Opt};
use crate::discover::{self, Target};
use crate::remote;

pub const COMMAND: Command = Command {
    name: "health",
    about: "Checks whether servers are serving.",
    positional: "[ADDRESS...]",
    options: &[
        discover::CLUSTER,
        Opt { name: "--service", value: "NAME", help: "check one service instead of the whole server" },
        Opt { name: "--timeout-ms", value: "N", help: "time to wait for an answer (2000)" },
    ],
    details: "\
ADDRESS is host:port of a server: the one of the ClusterSpec, which is asked for its data port, or the data port.
Without an ADDRESS: all tasks of --cluster, or of $TF_CONFIG. The exit status is 0 only if all are SERVING.
",
    run,
};

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let timeout = Duration::from_millis(args.number("--timeout-ms", 2000, 1, 600_000)?);
    let service = args.get("--service").unwrap_or_default();
    let targets = discover::targets(args)?;
    let runtime = remote::runtime()?;
    let mut all_well = true;
    for Target { address, .. } in &targets {
        let asked = runtime.block_on(async {
            let data = discover::data_port(address, timeout).await?;
            let channel = remote::channel(&data, timeout).map_err(|e| e.to_string())?;
            let request = HealthCheckRequest { service: service.to_owned() };
            HealthClient::new(channel).check(request).await.map_err(|status| remote::explain(&status))
        });
        match asked {
            Ok(reply) => {
                let status = reply.into_inner().status();
                println!("{address} {}", status.as_str_name());
                all_well &= status.as_str_name() == "SERVING";
            }
            Err(reason) => {
                println!("{address} UNREACHABLE ({reason})");
                all_well = false;
            }
        }
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
