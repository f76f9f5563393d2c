//! `starctl health`: is a server there and serving?

use std::process::ExitCode;
use std::time::Duration;

use starwire_engine::control::proto::health::HealthCheckRequest;
use starwire_engine::control::proto::health::health_client::HealthClient;

use crate::args::{Args, Command, Failure, Opt};
use crate::remote;

pub const COMMAND: Command = Command {
    name: "health",
    about: "Checks whether servers are serving.",
    positional: "ADDRESS...",
    options: &[
        Opt { name: "--service", value: "NAME", help: "check one service instead of the whole server" },
        Opt { name: "--timeout-ms", value: "N", help: "time to wait for an answer (2000)" },
    ],
    details: "ADDRESS is the data port of a server, host:port. The exit status is 0 only if all are SERVING.\n",
    run,
};

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let timeout = Duration::from_millis(args.number("--timeout-ms", 2000, 1, 600_000)?);
    let service = args.get("--service").unwrap_or_default();
    if args.positional.is_empty() {
        return Err(Failure::Usage("no server: give the address of its data port".to_owned()));
    }
    let addresses = args.positional.iter().map(|text| remote::parse_address(text)).collect::<Result<Vec<_>, _>>()?;
    let runtime = remote::runtime()?;
    let mut all_well = true;
    for address in &addresses {
        let asked = runtime.block_on(async {
            let mut client = HealthClient::new(remote::channel(address, timeout)?);
            Ok(client.check(HealthCheckRequest { service: service.to_owned() }).await)
        });
        match asked? {
            Ok(reply) => {
                let status = reply.into_inner().status();
                println!("{address} {}", status.as_str_name());
                all_well &= status.as_str_name() == "SERVING";
            }
            Err(status) => {
                println!("{address} UNREACHABLE ({})", remote::explain(&status));
                all_well = false;
            }
        }
    }
    Ok(if all_well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
