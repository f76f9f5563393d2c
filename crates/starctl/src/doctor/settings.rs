//! The environment and the endpoint map, as a server of this cluster would read them.

use std::net::TcpStream;
use std::time::Duration;

use starwire_engine::config::{Config, Env, Identity, ProcessEnv, Protocol, UnknownProtocol};

use super::Finding;
use crate::args::{Args, Failure};
use crate::cluster::Cluster;

const CONNECT: Duration = Duration::from_secs(2);

pub fn examine(args: &Args, cluster: Option<&Cluster>) -> Result<Vec<Finding>, Failure> {
    let identity = identity(args, cluster)?;
    let mut findings = check(&ProcessEnv, identity, cluster.is_some());
    if let Ok(Some(map)) = starwire_engine::config::EndpointMap::find(&ProcessEnv) {
        findings.extend(data_ports(cluster, &map, args.has("--connect")));
    }
    Ok(findings)
}

fn identity(args: &Args, cluster: Option<&Cluster>) -> Result<Identity, Failure> {
    let own = cluster.and_then(|c| c.own.map(|own| &c.tasks[own]));
    // Which job matters for a few variables only: any one of the cluster will do.
    let some = cluster.and_then(|c| c.tasks.first());
    let job = args.get("--job").or_else(|| own.or(some).map(|task| task.job.as_str())).unwrap_or("worker").to_owned();
    let cpus_allowed = std::thread::available_parallelism().map_or(1, usize::from);
    let protocol = args.get("--protocol").map_or(Ok(Protocol::GrpcPlusPlus), str::parse);
    let protocol = protocol.map_err(|unknown: UnknownProtocol| Failure::Usage(unknown.to_string()))?;
    let Some(cluster) = cluster else {
        let task = format!("/job:{job}/replica:0/task:0");
        let grpc_address = "localhost:0".to_owned();
        return Ok(Identity {
            protocol,
            job,
            task,
            grpc_address,
            tasks: Vec::new(),
            cpus_allowed,
            grpc_gives_way: true,
        });
    };
    let me = own.filter(|task| task.job == job).or_else(|| cluster.tasks.iter().find(|task| task.job == job));
    let me = me.ok_or_else(|| Failure::Usage(format!("the cluster has no job {job:?}; choose one with --job")))?;
    Ok(Identity {
        protocol,
        job,
        task: me.name(),
        grpc_address: me.address.clone(),
        tasks: cluster.tasks.iter().map(|task| (task.name(), task.address.clone())).collect(),
        cpus_allowed,
        grpc_gives_way: true,
    })
}

fn check(env: &dyn Env, identity: Identity, knows_cluster: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let task = identity.task.clone();
    let config = if knows_cluster { Config::from_env(env, identity) } else { without_cluster(env, identity) };
    let config = match config {
        Ok(config) => config,
        Err(error) => return vec![Finding::bad("configuration", error.to_string())],
    };
    let set: Vec<String> =
        config.settings.iter().filter(|s| !s.is_default).map(|s| format!("{}={}", s.name, s.value)).collect();
    let set = if set.is_empty() { "all variables have their default values".to_owned() } else { set.join(" ") };
    let size = if knows_cluster { format!("{} reactors; ", config.reactors) } else { String::new() };
    findings.push(Finding::ok("configuration", format!("{task}: {size}{set}")));
    findings.extend(config.warnings.iter().map(|warning| Finding::note("configuration", warning)));
    findings.push(match &config.endpoint_map {
        Some(map) => Finding::ok("endpoint map", format!("{}, {} tasks", map.path().display(), map.len())),
        None => Finding::ok("endpoint map", "none: servers advertise their data ports to each other"),
    });
    findings.extend(super::rdma::examine(&config.verbs));
    findings
}

/// The endpoint map's own lines are checked, but which tasks must be in it is not known.
fn without_cluster(env: &dyn Env, mut identity: Identity) -> Result<Config, starwire_engine::config::ConfigError> {
    if let Some(map) = starwire_engine::config::EndpointMap::find(env)? {
        if let Some(address) = map.addresses().next() {
            identity.grpc_address = address.to_owned();
        }
    }
    Config::from_env(env, identity)
}

/// Whether each data address of the map has a meaning here and, if asked, somebody who answers.
fn data_ports(cluster: Option<&Cluster>, map: &starwire_engine::config::EndpointMap, connect: bool) -> Vec<Finding> {
    let mut addresses: Vec<&str> = match cluster {
        Some(cluster) => cluster.tasks.iter().map(|task| task.address.as_str()).collect(),
        None => map.addresses().collect(),
    };
    addresses.sort_unstable();
    let mut findings = Vec::new();
    let mut fine = 0;
    for (grpc, data) in addresses.iter().filter_map(|grpc| Some((*grpc, map.get(grpc)?))) {
        let subject = format!("data port of {grpc}");
        let found = match data.resolve() {
            Ok(found) => found,
            Err(error) => {
                findings.push(Finding::bad(subject, format!("{data}: cannot look up the host: {error}")));
                continue;
            }
        };
        if connect {
            let attempts: Vec<_> = found.iter().map(|address| TcpStream::connect_timeout(address, CONNECT)).collect();
            if !attempts.iter().any(Result::is_ok) {
                let why = attempts.into_iter().find_map(Result::err).map_or_else(String::new, |e| format!(": {e}"));
                findings.push(Finding::note(subject, format!("{data} does not answer{why}")));
                continue;
            }
        }
        fine += 1;
    }
    if fine > 0 {
        let what = if connect { "reachable" } else { "with a host that resolves here" };
        findings.push(Finding::ok("data ports", format!("{fine} {what}")));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;
    use starwire_engine::config::{EndpointMap, MapEnv};
    use std::net::TcpListener;
    use std::path::Path;

    fn identity_of(job: &str) -> Identity {
        Identity {
            protocol: Protocol::GrpcPlusPlus,
            job: job.to_owned(),
            task: format!("/job:{job}/replica:0/task:0"),
            grpc_address: "localhost:0".to_owned(),
            tasks: Vec::new(),
            cpus_allowed: 4,
            grpc_gives_way: true,
        }
    }

    #[test]
    fn a_wrong_value_is_bad_and_a_misspelt_name_is_a_note() {
        let env = MapEnv::new("/nowhere").set("STARWIRE_DRIVER", "x");
        let findings = check(&env, identity_of("ps"), false);
        assert_eq!((findings.len(), findings[0].verdict), (1, Verdict::Bad));
        let env = MapEnv::new("/nowhere").set("STARWIRE_DRIVRE", "x").set("PS_ENABLE_POLLING", "1");
        let findings = check(&env, identity_of("ps"), false);
        assert_eq!(findings[0].text, "/job:ps/replica:0/task:0: PS_ENABLE_POLLING=true");
        assert_eq!(findings[1].verdict, Verdict::Note);
        assert_eq!(findings[2].text, "none: servers advertise their data ports to each other");
    }

    #[test]
    fn data_ports_that_answer_and_that_do_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = listener.local_addr().unwrap().port();
        let closed = {
            let other = TcpListener::bind("127.0.0.1:0").unwrap();
            other.local_addr().unwrap().port()
        };
        let text = format!("a:1=127.0.0.1:{open}\nb:1=127.0.0.1:{closed}\n");
        let map = EndpointMap::parse(Path::new("m"), text.as_bytes()).unwrap();
        let findings = data_ports(None, &map, true);
        assert_eq!(findings.iter().map(|f| f.verdict).collect::<Vec<_>>(), [Verdict::Note, Verdict::Ok]);
        assert_eq!(findings[0].subject, "data port of b:1");
        assert_eq!(findings[1].text, "1 reachable");
        assert_eq!(data_ports(None, &map, false)[0].text, "2 with a host that resolves here");
    }
}
