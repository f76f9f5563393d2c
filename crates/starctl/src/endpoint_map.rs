//! `starctl endpoint-map`: writes an `.endpoint_map` for a cluster.

use std::collections::HashSet;
use std::path::Path;
use std::process::ExitCode;

use starwire_engine::config::{EndpointMap, HostPort, ProcessEnv, is_loopback};

use crate::cluster::{Cluster, ClusterOption};
use crate::failure::Failure;
use crate::output::print;

/// Write an .endpoint_map for a cluster to standard output
#[derive(clap::Args)]
#[command(after_help = "\
  starctl endpoint-map --cluster ps=ps0:2222,ps1:2222 --cluster worker=w0:2222 > .endpoint_map")]
pub struct Args {
    #[command(flatten)]
    cluster: ClusterOption,
    /// Data port of the first task on each host; the others follow
    #[arg(long, default_value_t = 3333, value_parser = clap::value_parser!(u16).range(1..))]
    port: u16,
}

pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let none = || Failure::Usage("no cluster: give --cluster or set TF_CONFIG".to_owned());
    let cluster = args.cluster.read(&ProcessEnv)?.ok_or_else(none)?;
    print(render(&cluster, args.port).map_err(Failure::Failed)?)?;
    Ok(ExitCode::SUCCESS)
}

fn render(cluster: &Cluster, first_port: u16) -> Result<String, String> {
    // Data ports must not collide with each other nor with gRPC ports of the same host.
    let mut taken: HashSet<(String, u16)> =
        cluster.tasks.iter().map(|task| (machine(&task.address.host), task.address.port)).collect();
    let mut text = String::from("# gRPC address as in the ClusterSpec = data address\n");
    for task in &cluster.tasks {
        let host = &task.address.host;
        let port = (first_port..=u16::MAX)
            .find(|port| taken.insert((machine(host), *port)))
            .ok_or_else(|| format!("{host} has no free port from {first_port} on"))?;
        let data = HostPort { host: host.clone(), port };
        text += &format!("{}={data}  # {}\n", task.address, task.name());
    }
    // A server must be able to read it.
    EndpointMap::parse(Path::new("the map"), text.as_bytes()).map_err(|e| e.to_string())?;
    Ok(text)
}

/// All names of this machine are one machine.
fn machine(host: &str) -> String {
    if is_loopback(host) { "localhost".to_owned() } else { host.to_ascii_lowercase() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(cluster: &str, port: u16) -> Result<String, String> {
        render(&Cluster::parse(&[cluster.to_owned()]).unwrap(), port)
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
