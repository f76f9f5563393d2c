//! The environment and the endpoint map, as a server of this cluster would read them.

use std::net::TcpStream;
use std::time::Duration;

use starwire_engine::config::{Config, ConfigError, EndpointMap, Env, Identity, Ports, ProcessEnv, Protocol};

use super::{Args, Finding};
use crate::cluster::{Cluster, Task};
use crate::failure::Failure;

const CONNECT: Duration = Duration::from_secs(2);

pub fn examine(args: &Args, cluster: Option<&Cluster>) -> Result<Vec<Finding>, Failure> {
    let identity = identity(args, cluster, &ProcessEnv)?;
    let config = configure(&ProcessEnv, identity, cluster.is_some());
    let mut findings = check(&config, cluster.is_some());
    if let Ok(config) = &config {
        findings.extend(data_ports(config, args.connect));
    }
    Ok(findings)
}

/// As `import starwire` reads it.
fn protocol_of(env: &dyn Env) -> Option<Protocol> {
    let name = env.var("STARWIRE_PROTOCOL")?;
    name.to_str()?.trim_start_matches("starwire+").parse().ok()
}

fn identity(args: &Args, cluster: Option<&Cluster>, env: &dyn Env) -> Result<Identity, Failure> {
    let tasks = cluster.map_or(&[][..], |cluster| &cluster.tasks);
    let own = cluster.and_then(|cluster| cluster.own).map(|own| &tasks[own]);
    // Only a few variables depend on the job: any one of the cluster will do. Only a parameter server has a state.
    let other = if env.var("STARWIRE_STATE").is_some() { "ps" } else { "worker" };
    let job = args.job.as_deref().or_else(|| own.or(tasks.first()).map(|task| task.job.as_str())).unwrap_or(other);
    let me = own.filter(|task| task.job == job).or_else(|| tasks.iter().find(|task| task.job == job));
    if cluster.is_some() && me.is_none() {
        return Err(Failure::Usage(format!("the cluster has no job {job:?}; choose one with --job")));
    }
    Ok(Identity {
        protocol: args.protocol.or_else(|| protocol_of(env)).unwrap_or(Protocol::GrpcPlusPlus),
        job: job.to_owned(),
        task: me.map_or_else(|| format!("/job:{job}/replica:0/task:0"), Task::name),
        // Another task's host is not what this one's certificate names.
        grpc_address: match me {
            Some(task) if own.is_some_and(|own| std::ptr::eq(own, task)) => task.address.to_string(),
            Some(task) => format!("0.0.0.0:{}", task.address.port),
            None => "0.0.0.0:0".to_owned(),
        },
        tasks: tasks.iter().map(|task| (task.name(), task.address.to_string())).collect(),
        cpus_allowed: std::thread::available_parallelism().map_or(1, usize::from),
        grpc_gives_way: true,
    })
}

fn check(config: &Result<Config, ConfigError>, knows_cluster: bool) -> Vec<Finding> {
    let mut findings = Vec::new();
    let config = match config {
        Ok(config) => config,
        Err(error) => return vec![Finding::bad("configuration", error.to_string())],
    };
    let set: Vec<String> =
        config.settings.iter().filter(|s| !s.is_default).map(|s| format!("{}={}", s.name, s.value)).collect();
    let set = if set.is_empty() { "all variables have their default values".to_owned() } else { set.join(" ") };
    let size = if knows_cluster { format!("{} reactors; ", config.reactors) } else { String::new() };
    findings.push(Finding::ok("configuration", format!("{}: {size}{set}", config.identity.task)));
    findings.extend(config.warnings.iter().map(|warning| Finding::note("configuration", warning)));
    findings.push(match &config.endpoint_map {
        Some(map) => Finding::ok("endpoint map", format!("{}, {} tasks", map.path().display(), map.len())),
        None if config.ports == Ports::One => {
            Finding::ok("endpoint map", "none: data ports are those of the ClusterSpec")
        }
        None => Finding::ok(
            "endpoint map",
            format!("none: data ports are those of the ClusterSpec plus {} (STARWIRE_PORT_OFFSET)", config.port_offset),
        ),
    });
    findings.extend(super::rdma::examine(&config.verbs));
    findings
}

/// Without a cluster, the endpoint map's own lines are checked, but which tasks must be in it is not known.
fn configure(env: &dyn Env, mut identity: Identity, knows_cluster: bool) -> Result<Config, ConfigError> {
    if !knows_cluster {
        if let Some(address) = EndpointMap::find(env)?.as_ref().and_then(|map| map.addresses().next()) {
            identity.grpc_address = address.to_owned();
        }
    }
    Config::from_env(env, identity)
}

/// Whether the host of each data port resolves here and, with `connect`, whether the port answers.
fn data_ports(config: &Config, connect: bool) -> Vec<Finding> {
    let tasks = config.identity.tasks.iter().map(|(_, address)| address.as_str());
    let mut addresses: Vec<&str> = match &config.endpoint_map {
        Some(map) if config.identity.tasks.is_empty() => map.addresses().collect(),
        _ => tasks.collect(),
    };
    addresses.sort_unstable();
    let mut findings = Vec::new();
    let mut fine = 0;
    for grpc in addresses {
        let subject = format!("data port of {grpc}");
        let data = match config.data_address("this task", grpc) {
            Ok(data) => data.address().clone(),
            Err(error) => {
                findings.push(Finding::bad(subject, error.to_string()));
                continue;
            }
        };
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
    use starwire_engine::config::MapEnv;
    use std::net::TcpListener;

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

    fn checked(env: &MapEnv) -> Vec<Finding> {
        check(&configure(env, identity_of("ps"), false), false)
    }

    #[test]
    fn a_wrong_value_is_bad_and_a_misspelt_name_is_a_note() {
        let env = MapEnv::new("/nowhere").set("STARWIRE_DRIVER", "x");
        let findings = checked(&env);
        assert_eq!((findings.len(), findings[0].verdict), (1, Verdict::Bad));
        let env = MapEnv::new("/nowhere").set("STARWIRE_DRIVRE", "x").set("PS_ENABLE_POLLING", "1");
        let findings = checked(&env);
        assert_eq!(findings[0].text, "/job:ps/replica:0/task:0: PS_ENABLE_POLLING=true");
        assert_eq!(findings[1].verdict, Verdict::Note);
        assert_eq!(findings[2].text, "none: data ports are those of the ClusterSpec");
        let findings = checked(&MapEnv::new("/nowhere").set("STARWIRE_PORTS", "two"));
        let expected = "none: data ports are those of the ClusterSpec plus 1000 (STARWIRE_PORT_OFFSET)";
        assert_eq!(findings[1].text, expected);
    }

    #[test]
    fn data_ports_that_answer_and_that_do_not() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let open = listener.local_addr().unwrap().port();
        let closed = {
            let other = TcpListener::bind("127.0.0.1:0").unwrap();
            other.local_addr().unwrap().port()
        };
        let path = std::env::temp_dir().join(format!("starctl-doctor-{}", std::process::id()));
        std::fs::write(&path, format!("a:1=127.0.0.1:{open}\nb:1=127.0.0.1:{closed}\n")).unwrap();
        let mapped = configure(&MapEnv::new("/nowhere").set("STARWIRE_ENDPOINT_MAP", &path), identity_of("ps"), false);
        std::fs::remove_file(&path).unwrap();
        let mapped = mapped.unwrap();
        let findings = data_ports(&mapped, true);
        assert_eq!(findings.iter().map(|f| f.verdict).collect::<Vec<_>>(), [Verdict::Note, Verdict::Ok]);
        assert_eq!(findings[0].subject, "data port of b:1");
        assert_eq!(findings[1].text, "1 reachable");
        assert_eq!(data_ports(&mapped, false)[0].text, "2 with a host that resolves here");
        // Without a map, by the rule.
        let tasks = vec![("/job:ps/replica:0/task:0".to_owned(), format!("127.0.0.1:{open}"))];
        let identity = Identity { tasks, ..identity_of("ps") };
        let unmapped = configure(&MapEnv::new("/nowhere"), identity, true).unwrap();
        assert_eq!(data_ports(&unmapped, true)[0].text, "1 reachable");
    }
}
