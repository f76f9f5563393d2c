//! `starctl endpoint-map`: writes an `.endpoint_map` for a cluster.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use starwire_engine::config::{EndpointMap, HostPort, is_loopback};

use crate::args::{Args, Command, Failure, Opt};
use crate::cluster::{self, Cluster};

pub const COMMAND: Command = Command {
    name: "endpoint-map",
    about: "Writes an .endpoint_map for a cluster to standard output.",
    positional: "",
    options: &[
        cluster::CLUSTER,
        Opt {
            name: "--port",
            value: "PORT",
            help: "data port of the first task on each host; the others follow (3333)",
        },
    ],
    details: "\
Without --cluster, the cluster is taken from $TF_CONFIG.

  starctl endpoint-map --cluster ps=ps0:2222,ps1:2222 --cluster worker=w0:2222 > .endpoint_map
",
    run,
};

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let tf_config = std::env::var("TF_CONFIG").ok();
    let port = args.number("--port", 3333u16, 1, u16::MAX)?;
    let cluster = Cluster::from_args(args, tf_config.as_deref())?
        .ok_or_else(|| Failure::Usage("no cluster: give --cluster or set TF_CONFIG".to_owned()))?;
    let text = render(&cluster, port).map_err(Failure::Failed)?;
    print!("{text}");
    Ok(ExitCode::SUCCESS)
}

fn render(cluster: &Cluster, first_port: u16) -> Result<String, String> {
    let own: Vec<(HostPort, &cluster::Task)> = cluster
        .tasks
        .iter()
        .map(|task| task.address.parse().map(|address| (address, task)).map_err(|e| format!("{}: {e}", task.address)))
        .collect::<Result<_, String>>()?;
    // Data ports must not collide with each other nor with gRPC ports of the same host.
    let mut taken: HashSet<(String, u16)> =
        own.iter().map(|(address, _)| (machine(&address.host), address.port)).collect();
    let mut text = String::from("# gRPC address as in the ClusterSpec = data address\n");
    for (address, task) in &own {
        let machine = machine(&address.host);
        let port = (first_port..=u16::MAX)
            .find(|port| !taken.contains(&(machine.clone(), *port)))
            .ok_or_else(|| format!("{} has no free port from {first_port} on", address.host))?;
        taken.insert((machine, port));
        let data = HostPort { host: address.host.clone(), port };
        text += &format!("{}={data}  # {}\n", task.address, task.name());
    }
    // What we write must be what we read.
    let map = EndpointMap::parse(Path::new("the map"), text.as_bytes()).map_err(|e| e.to_string())?;
    let names: Vec<(String, &str)> = cluster.tasks.iter().map(|t| (t.name(), t.address.as_str())).collect();
    map.require(names.iter().map(|(name, address)| (name.as_str(), *address))).map_err(|e| e.to_string())?;
    Ok(text)
}

/// All names of this machine are one machine.
fn machine(host: &str) -> String {
    if is_loopback(host) { "localhost".to_owned() } else { host.to_ascii_lowercase() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Parsed, parse};

    fn map(cluster: &str, port: u16) -> Result<String, String> {
        let words = ["--cluster".to_owned(), cluster.to_owned()];
        let Ok(Parsed::Run(args)) = parse(&COMMAND, &words) else { panic!("bad words") };
        let Ok(Some(cluster)) = Cluster::from_args(&args, None) else { panic!("bad cluster") };
        render(&cluster, port)
    }

    #[test]
    fn tasks_of_one_host_get_ports_of_their_own() {
        let text = map("ps=a:3334,b:2222;worker=a:2222,localhost:3333,127.0.0.1:2222,[::1]:1", 3333).unwrap();
        let lines: Vec<&str> = text.lines().skip(1).map(|line| line.split_once("  #").unwrap().0).collect();
        assert_eq!(
            lines,
            [
                "a:3334=a:3333",
                "b:2222=b:3333",
                "a:2222=a:3335",
                "localhost:3333=localhost:3334",
                "127.0.0.1:2222=127.0.0.1:3335",
                "[::1]:1=[::1]:3336"
            ]
        );
    }

    #[test]
    fn running_out_of_ports_is_an_error() {
        assert_eq!(map("ps=a:1,a:2", 65535).unwrap_err(), "a has no free port from 65535 on");
    }
}
