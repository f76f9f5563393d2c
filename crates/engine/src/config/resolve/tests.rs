use super::super::ControlAccess;
use super::super::env::MapEnv;
use super::super::testing::TempDir;
use super::super::{DriverChoice, Protocol, ReadBy, Running, UnixSockets, VARIABLES};
use super::*;
use std::net::SocketAddr;

fn identity(job: &str, tasks: usize) -> Identity {
    Identity {
        protocol: Protocol::GrpcPlusPlus,
        job: job.to_owned(),
        task: format!("/job:{job}/replica:0/task:0"),
        grpc_address: "localhost:2222".to_owned(),
        tasks: (0..tasks)
            .map(|i| (format!("/job:{job}/replica:0/task:{i}"), format!("localhost:{}", 2222 + i)))
            .collect(),
        cpus_allowed: 64,
        grpc_gives_way: true,
    }
}

fn env() -> MapEnv {
    MapEnv::new("/nowhere")
}

fn config(env: &MapEnv, job: &str) -> Config {
    from_env(env, identity(job, 4)).unwrap()
}

fn error(env: &MapEnv, job: &str) -> String {
    from_env(env, identity(job, 4)).unwrap_err().to_string()
}

#[test]
fn defaults() {
    let c = config(&env(), "worker");
    assert_eq!((c.reactors, c.polling, c.pinning), (4, false, false));
    assert_eq!(c.connect_timeout, Duration::from_secs(120));
    assert_eq!((c.driver, c.unix), (DriverChoice::Auto, UnixSockets::Auto));
    assert_eq!(c.control, ControlAccess::Everybody);
    assert_eq!(c.keepalive, Keepalive { interval: Duration::from_secs(5), timeout: Duration::from_secs(15) });
    assert_eq!(c.max_call_bytes, 16 << 30);
    assert!(c.endpoint_map.is_none() && c.secret.is_none() && c.cluster_id.is_empty() && c.warnings.is_empty());
    assert_eq!(c.bind, ["127.0.0.1:2222".parse().unwrap(), "[::1]:2222".parse().unwrap()]);
}

#[test]
fn every_variable_of_the_table_is_read() {
    let c = config(&env(), "ps");
    for variable in VARIABLES.iter().filter(|v| v.read_by() != ReadBy::Python) {
        let setting = c.settings.iter().find(|s| s.name == variable.name());
        assert!(setting.is_some_and(|s| s.is_default), "{} is in the table, but is not read", variable.name());
    }
}

#[test]
fn masters_know_whether_the_jobs_of_parameter_servers_are_set() {
    assert_eq!(Config::ps_jobs_from_env(&env()).unwrap(), None);
    assert_eq!(config(&env(), "ps").ps_jobs, ["ps"]);
    let named = env().set("STARWIRE_PS_JOBS", "a, b");
    assert_eq!(Config::ps_jobs_from_env(&named).unwrap(), Some(vec!["a".to_owned(), "b".to_owned()]));
    assert_eq!(config(&named, "ps").ps_jobs, ["a", "b"]);
}

#[test]
fn polling_and_pinning_go_by_job() {
    let env = env().set("WORKER_ENABLE_POLLING", "1").set("WORKER_DISABLE_PIN_CORES", "false");
    for (job, on) in [("worker", true), ("chief", true), ("ps", false), ("evaluator", false)] {
        let c = config(&env, job);
        assert_eq!((c.polling, c.pinning), (on, on), "{job}");
    }
    let env = MapEnv::new("/").set("PS_ENABLE_POLLING", "true").set("PS_DISABLE_PIN_CORES", "0");
    for (job, on) in [("worker", false), ("chief", false), ("ps", true), ("evaluator", true)] {
        let c = config(&env, job);
        assert_eq!((c.polling, c.pinning), (on, on), "{job}");
    }
}

#[test]
fn reactors_are_limited_by_tasks_by_cpus_and_by_the_jobs_variable() {
    let reactors = |env: &MapEnv, protocol: Protocol, job: &str, tasks: usize, cpus: usize| {
        let identity = Identity { protocol, cpus_allowed: cpus, ..identity(job, tasks) };
        from_env(env, identity).unwrap().reactors
    };
    let env = env();
    assert_eq!(reactors(&env, Protocol::GrpcPlusPlus, "ps", 3, 64), 3);
    assert_eq!(reactors(&env.clone().set("STARWIRE_JOIN", "worker:5"), Protocol::GrpcPlusPlus, "ps", 3, 64), 8);
    assert_eq!(reactors(&env, Protocol::GrpcPlusPlus, "ps", 100, 64), 16);
    assert_eq!(reactors(&env, Protocol::GrpcPlusPlus, "ps", 100, 2), 2);
    assert_eq!(reactors(&env, Protocol::GrpcPlusPlus, "ps", 0, 0), 1);
    assert_eq!(reactors(&env, Protocol::StarServer, "ps", 100, 64), 8);
    assert_eq!(reactors(&env, Protocol::StarServerLite, "worker", 100, 64), 2);
    assert_eq!(reactors(&env, Protocol::StarServer, "evaluator", 100, 64), 16);
    let env = env.set("NETWORK_PS_CORE_NUMBER", "5").set("NETWORK_WORKER_CORE_NUMBER", "3");
    assert_eq!(reactors(&env, Protocol::StarServer, "ps", 100, 64), 5);
    assert_eq!(reactors(&env, Protocol::GrpcPlusPlus, "chief", 100, 64), 3);
    assert_eq!(reactors(&env, Protocol::GrpcPlusPlus, "evaluator", 100, 64), 16);
    assert_eq!(
        reactors(&env.clone().set("STARWIRE_PS_JOBS", "a, evaluator"), Protocol::GrpcPlusPlus, "evaluator", 100, 64),
        5
    );
    assert_eq!(
        reactors(&env.set("STARWIRE_REACTORS", "7"), Protocol::GrpcPlusPlus, "ps", 1, 1),
        7,
        "exact means exact"
    );
}

#[test]
fn one_port_is_the_one_of_the_cluster_spec() {
    let one = env().set("STARWIRE_PORTS", "one");
    let c = config(&one, "worker");
    assert_eq!(c.bind, ["127.0.0.1:2222".parse().unwrap(), "[::1]:2222".parse().unwrap()]);
    assert_eq!(config(&one.clone().set("STARWIRE_BIND", "0.0.0.0"), "ps").bind, ["0.0.0.0:2222".parse().unwrap()]);
    assert_eq!(config(&one.clone().set("STARWIRE_BIND", "[::]:2222"), "ps").bind, ["[::]:2222".parse().unwrap()]);
    let other = error(&one.clone().set("STARWIRE_BIND", "0.0.0.0:7000"), "ps");
    assert!(other.starts_with("STARWIRE_PORTS and STARWIRE_BIND conflict: port 7000 was chosen"), "{other}");

    let folder = TempDir::new("one-port");
    let map = |own: u16| {
        let line = |i: u16, data: u16| format!("localhost:{}=10.0.0.{i}:{data}\n", 2222 + i);
        let text = [line(0, own), line(1, 9), line(2, 9), line(3, 9)].concat();
        std::fs::write(folder.path().join(".endpoint_map"), text).unwrap();
        one.clone().set("TF_SEASTAR_ENDPOINT_MAP_PATH", folder.path())
    };
    assert_eq!(config(&map(2222), "ps").bind, ["0.0.0.0:2222".parse().unwrap()]);
    let other = error(&map(7000), "ps");
    assert!(other.starts_with("STARWIRE_PORTS and .endpoint_map conflict") && other.contains(":1 gives"), "{other}");
}

#[test]
fn one_port_is_the_default_unless_the_map_plans_another() {
    let folder = TempDir::new("ports");
    let ports = |choice: &str, mapped: Option<u16>, grpc_gives_way: bool| {
        let mut env = env().set("STARWIRE_PORTS", choice);
        if let Some(own) = mapped {
            std::fs::write(folder.path().join(".endpoint_map"), format!("localhost:2222=10.0.0.1:{own}\n")).unwrap();
            env = env.set("TF_SEASTAR_ENDPOINT_MAP_PATH", folder.path());
        }
        from_env(&env, Identity { grpc_gives_way, ..identity("ps", 1) }).unwrap().ports
    };
    assert_eq!(config(&env(), "ps").ports, Ports::One);
    assert_eq!(
        [None, Some(2222), Some(7000)].map(|own| ports("auto", own, true)),
        [Ports::One, Ports::One, Ports::Two]
    );
    assert_eq!([None, Some(2222), Some(7000)].map(|own| ports("auto", own, false)), [Ports::Two; 3]);
    assert_eq!([None, Some(2222), Some(7000)].map(|own| ports("two", own, true)), [Ports::Two; 3]);
}

#[test]
fn grpc_is_open_unless_there_is_a_secret() {
    let secret = ("STARWIRE_SECRET", "0123456789abcdef");
    for (grpc, without, with) in [("auto", true, false), ("on", true, true), ("off", false, false)] {
        let env = env().set("STARWIRE_PORTS", "one").set("STARWIRE_GRPC", grpc);
        assert_eq!(config(&env, "ps").passes_grpc, without, "{grpc}");
        assert_eq!(config(&env.set(secret.0, secret.1), "ps").passes_grpc, with, "{grpc}");
    }
    let warnings = config(&env().set("STARWIRE_PORTS", "two").set("STARWIRE_GRPC", "off"), "ps").warnings;
    assert!(warnings.len() == 1 && warnings[0].contains("has no effect without STARWIRE_PORTS=one"), "{warnings:?}");
}

#[test]
fn required_authentication_leaves_nothing_open() {
    let required = env().set("STARWIRE_REQUIRE_AUTH", "true");
    let told = error(&required.clone().set("STARWIRE_PORTS", "two"), "ps");
    assert!(told.ends_with("set STARWIRE_SECRET_FILE or STARWIRE_TLS_CERT, STARWIRE_PORTS=one"), "{told}");
    let closed = required.set("STARWIRE_SECRET", "0123456789abcdef").set("STARWIRE_PORTS", "one");
    config(&closed, "ps");
    let open = closed.clone().set("STARWIRE_CONTROL", "on");
    assert!(error(&open, "ps").ends_with("set STARWIRE_CONTROL=loopback"));
    assert!(error(&closed.set("STARWIRE_GRPC", "on"), "ps").ends_with("set STARWIRE_GRPC=auto"));
}

/// The environment of a task with TLS; the files are in the directory.
fn with_tls(folder: &TempDir) -> MapEnv {
    let mut params = rcgen::CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let issuer = rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap();
    let key = rcgen::KeyPair::generate().unwrap();
    let own = rcgen::CertificateParams::new(vec!["task.example".to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
    let ca: &rcgen::Certificate = issuer.as_ref();
    let mut env = env().set("STARWIRE_PORTS", "one").set("STARWIRE_TLS_PEERS", "task.example");
    let files = [("CERT", own.pem()), ("KEY", key.serialize_pem()), ("CA", ca.pem())];
    for (name, text) in files {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        env = env.set(&format!("STARWIRE_TLS_{name}"), &path);
    }
    env
}

#[test]
fn with_tls_only_those_with_a_certificate_get_in() {
    let folder = TempDir::new("tls");
    let env = with_tls(&folder);
    let of = |env: &MapEnv| {
        let config = config(env, "ps");
        (config.passes_grpc, config.passes_members, config.control, config.control_by_tls)
    };
    use ControlAccess::{Everybody, Loopback, Nobody};
    assert_eq!(of(&env), (false, true, Loopback, Everybody));
    assert_eq!(of(&env.clone().set("STARWIRE_SECRET", "0123456789abcdef")), (false, false, Loopback, Everybody));
    assert_eq!(of(&env.clone().set("STARWIRE_GRPC", "on")), (true, true, Loopback, Everybody));
    assert_eq!(of(&env.clone().set("STARWIRE_GRPC", "off")), (false, false, Loopback, Everybody));
    assert_eq!(of(&env.clone().set("STARWIRE_CONTROL", "on")), (false, true, Everybody, Everybody));
    assert_eq!(of(&env.clone().set("STARWIRE_CONTROL", "loopback")), (false, true, Loopback, Loopback));
    assert_eq!(of(&env.clone().set("STARWIRE_CONTROL", "off")), (false, true, Nobody, Nobody));
    let required = env.set("STARWIRE_REQUIRE_AUTH", "true");
    assert!(config(&required, "ps").tls.is_some());
    assert!(error(&required.set("STARWIRE_GRPC", "on"), "ps").ends_with("set STARWIRE_GRPC=auto"));
}

#[test]
fn with_a_secret_the_control_service_is_for_this_host_only() {
    let secret = env().set("STARWIRE_SECRET", "0123456789abcdef");
    assert_eq!(config(&env(), "ps").control, ControlAccess::Everybody);
    assert_eq!(config(&secret, "ps").control, ControlAccess::Loopback);
    assert_eq!(config(&secret.set("STARWIRE_CONTROL", "on"), "ps").control, ControlAccess::Everybody);
}

#[test]
fn more_pinned_reactors_than_cpus_is_an_error() {
    let env = env().set("STARWIRE_REACTORS", "65").set("PS_DISABLE_PIN_CORES", "false");
    assert_eq!(
        error(&env, "ps"),
        "STARWIRE_REACTORS and PS_DISABLE_PIN_CORES conflict: 65 reactors cannot have a CPU each: this process may use 64"
    );
}

#[test]
fn bad_values_name_the_variable_the_value_and_what_is_allowed() {
    for (name, value, allowed) in [
        ("NETWORK_PS_CORE_NUMBER", "0", "a whole number from 1 to 256"),
        ("NETWORK_MAX_CONNECTION_TIMEOUT", "-1", "a whole number from 1 to 86400000"),
        ("STARWIRE_DRIVER", "iouring", "one of auto, epoll, io_uring"),
        ("STARWIRE_UNIX", "on", "one of auto, socket, off"),
        ("STARWIRE_CONTROL", "yes", "one of auto, on, off, loopback"),
        ("STARWIRE_PS_JOBS", "ps,,x", "job names (letters, digits, '_') separated by commas"),
        ("STARWIRE_CLUSTER_ID", "a b", "at most 128 printable ASCII characters without spaces"),
        ("STARWIRE_MAX_CALL_BYTES", "1K", "a number of bytes from 1048576 to 1099511627776 (suffixes K, M, G, T)"),
        ("STARWIRE_PORT_OFFSET", "0", "a whole number from 1 to 65534"),
        ("STARWIRE_PORT_OFFSET", "-1000", "a whole number from 1 to 65534"),
        (
            "STARWIRE_BIND",
            "ps0",
            "an IP address of this machine, with or without a port (0.0.0.0, 10.0.0.7:7000, [::], [::1]:7000)",
        ),
        ("WORKER_DISABLE_PIN_CORES", "off", "true, false, 1 or 0"),
    ] {
        let expected = format!("{name}={value:?} is invalid: it must be {allowed}");
        // Also variables of other jobs: a worker's environment is usually the ps's environment.
        assert_eq!(error(&env().set(name, value), "ps"), expected);
    }
}

#[test]
fn with_two_ports_the_data_port_is_at_the_offset() {
    let two = env().set("STARWIRE_PORTS", "two");
    let bind = |env: &MapEnv| config(env, "ps").bind.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(bind(&two), ["127.0.0.1:3222", "[::1]:3222"]);
    assert_eq!(bind(&two.clone().set("STARWIRE_PORT_OFFSET", "7")), ["127.0.0.1:2229", "[::1]:2229"]);
    assert_eq!(bind(&two.clone().set("STARWIRE_BIND", "0.0.0.0")), ["0.0.0.0:3222"]);
    assert_eq!(bind(&two.clone().set("STARWIRE_BIND", "[::]:3222")), ["[::]:3222"]);
    assert_eq!(
        error(&two.clone().set("STARWIRE_BIND", "0.0.0.0:7000"), "ps"),
        "STARWIRE_PORT_OFFSET and STARWIRE_BIND conflict: port 7000 was chosen for /job:ps/replica:0/task:0, \
         whose peers look for its data port at 3222"
    );
    let data = |env: &MapEnv, address: &str| {
        let found = config(env, "ps").data_address("/job:ps/replica:0/task:1", address).map_err(|e| e.to_string())?;
        Ok::<_, String>((found.address().to_string(), found.remark(address)))
    };
    assert_eq!(data(&env(), "ps1:2222").unwrap(), ("ps1:2222".into(), String::new()));
    assert_eq!(data(&two, "ps1:2222").unwrap(), ("ps1:3222".into(), " (data port ps1:3222)".into()));
    assert_eq!(data(&two, "[::1]:64535").unwrap().0, "[::1]:65535");
    for (env, address, words) in [
        (
            &two,
            "ps1:64536",
            "no data port for the ClusterSpec address ps1:64536: its port and STARWIRE_PORT_OFFSET, 1000, exceed 65535 together",
        ),
        (
            &env(),
            "ps1",
            "the ClusterSpec address \"ps1\" of /job:ps/replica:0/task:1 is unusable: the port is missing (host:port)",
        ),
    ] {
        assert_eq!(data(env, address).unwrap_err(), words);
    }
}

#[test]
fn every_task_of_the_cluster_must_have_a_data_port() {
    let two = env().set("STARWIRE_PORTS", "two").set("STARWIRE_PORT_OFFSET", "63313");
    assert_eq!(from_env(&two, identity("ps", 1)).unwrap().bind[0].port(), 65535);
    let error = from_env(&two, identity("worker", 2)).unwrap_err().to_string();
    assert!(error.starts_with("no data port for the ClusterSpec address localhost:2223: "), "{error}");
}

#[test]
fn a_port_of_the_systems_choice_is_no_port_to_add_to() {
    let two = env().set("STARWIRE_PORTS", "two");
    let any = Identity { grpc_address: "localhost:0".to_owned(), ..identity("ps", 1) };
    assert_eq!(from_env(&two, any.clone()).unwrap().bind[0].port(), 0);
    for env in [env(), two] {
        let chosen = from_env(&env.set("STARWIRE_BIND", "127.0.0.1:7000"), any.clone()).unwrap();
        assert_eq!(chosen.bind, ["127.0.0.1:7000".parse().unwrap()]);
    }
}

#[test]
fn the_endpoint_map_gives_the_data_port() {
    let dir = TempDir::new("resolve-map");
    std::fs::write(dir.path().join(".endpoint_map"), "localhost:2222=10.0.0.7:3333\nlocalhost:2223=localhost:3334\n")
        .unwrap();
    let env = MapEnv::new(dir.path());
    let c = from_env(&env, identity("ps", 2)).unwrap();
    assert_eq!(c.bind, ["0.0.0.0:3333".parse().unwrap()]);
    let data = |task: usize, address: &str| {
        let found = c.data_address(&format!("/job:ps/replica:0/task:{task}"), address)?;
        Ok::<_, ConfigError>((found.address().to_string(), found.remark(address)))
    };
    let place = |line| format!(" ({}/.endpoint_map:{line} gives data port", dir.path().display());
    assert_eq!(data(0, "localhost:2222").unwrap(), ("10.0.0.7:3333".into(), place(1) + " 10.0.0.7:3333)"));
    assert_eq!(data(1, "localhost:2223").unwrap(), ("localhost:3334".into(), place(2) + " localhost:3334)"));
    let error = data(7, "ps7:2222").unwrap_err().to_string();
    assert!(error.ends_with("no line for /job:ps/replica:0/task:7, whose ClusterSpec address is ps7:2222"), "{error}");
    // A port of its own for the listener, as behind address translation.
    let c = from_env(&env.clone().set("STARWIRE_BIND", "0.0.0.0:99"), identity("ps", 2)).unwrap();
    assert_eq!(c.bind, ["0.0.0.0:99".parse().unwrap()]);

    let error = from_env(&env, identity("ps", 3)).unwrap_err().to_string();
    let expected = ".endpoint_map: no line for /job:ps/replica:0/task:2, whose ClusterSpec address is localhost:2224";
    assert!(error.ends_with(expected), "{error}");
}

#[test]
fn a_task_that_calls_itself_localhost_listens_for_peers_that_do_not() {
    let mut id = identity("ps", 1);
    id.tasks.push(("/job:worker/replica:0/task:0".to_owned(), "10.0.0.9:2222".to_owned()));
    for (ports, port) in [("one", 2222), ("two", 3222)] {
        let env = env().set("STARWIRE_PORTS", ports);
        let c = from_env(&env, id.clone()).unwrap();
        assert_eq!(c.bind, [SocketAddr::from(([0, 0, 0, 0], port))]);
        assert_eq!(c.warnings, [""; 0]);
        let any = Identity { grpc_address: "0.0.0.0:2222".to_owned(), ..id.clone() };
        assert_eq!(from_env(&env, any).unwrap().bind, [SocketAddr::from(([0, 0, 0, 0], port))]);
    }
    // A map that leads to loopback means it.
    let dir = TempDir::new("resolve-loopback");
    let lines = "localhost:2222=127.0.0.1:3333\n10.0.0.9:2222=127.0.0.1:3334\n";
    std::fs::write(dir.path().join(".endpoint_map"), lines).unwrap();
    let c = from_env(&MapEnv::new(dir.path()), id.clone()).unwrap();
    assert_eq!(c.bind, ["127.0.0.1:3333".parse().unwrap()]);
    id.grpc_address = "ps0".to_owned();
    assert_eq!(
        from_env(&env(), id).unwrap_err().to_string(),
        "the ClusterSpec address \"ps0\" of /job:ps/replica:0/task:0 is unusable: the port is missing (host:port)"
    );
}

#[test]
fn the_own_entry_does_not_spread_the_cluster() {
    let mut id = identity("ps", 2);
    id.tasks[0].1 = "10.0.0.7:2222".to_owned();
    let c = from_env(&env().set("STARWIRE_PORTS", "one"), id).unwrap();
    assert!(c.bind.iter().all(|address| address.ip().is_loopback()), "{:?}", c.bind);
}

#[test]
fn unknown_variables_become_warnings() {
    let c = config(&env().set("STARWIRE_BINDE", "x"), "ps");
    assert_eq!(c.warnings, ["STARWIRE_BINDE is set but is not a variable of starwire; did you mean STARWIRE_BIND?"]);
}

#[test]
fn the_banner_says_what_is_in_force_and_never_a_secret() {
    let running = Running { driver: "io_uring", bound: "127.0.0.1:4711".parse().unwrap() };
    assert_eq!(
        config(&env(), "ps").banner(running),
        "starwire: grpc++ on 4 reactors (io_uring, poll=off, pin=off), data port 127.0.0.1:4711, \
         endpoint map none, connection timeout 120000 ms, keep-alive 5000+15000 ms, unix=auto, secret=off, tls=off, control=on"
    );
    let env = env()
        .set("STARWIRE_SECRET", "correct horse battery staple")
        .set("PS_ENABLE_POLLING", "TRUE")
        .set("STARWIRE_REACTORS", "1")
        .set("STARWIRE_CONTROL", "loopback");
    let banner = config(&env, "ps").banner(running);
    assert!(
        banner.starts_with("starwire: grpc++ on 1 reactor (io_uring, poll=on, pin=off), data port 127.0.0.1:4711"),
        "{banner}"
    );
    assert!(banner.ends_with("secret=on, tls=off, control=loopback; set: PS_ENABLE_POLLING=true STARWIRE_REACTORS=1 STARWIRE_SECRET=set STARWIRE_CONTROL=loopback"), "{banner}");
    assert!(!banner.contains("horse"));
}

#[test]
fn a_state_of_another_process_needs_a_folder() {
    let from = env().set("STARWIRE_STATE_FROM", "move=ps-0:2222");
    for env in [from.clone(), from.clone().set("STARWIRE_STATE", "")] {
        let text = error(&env, "ps");
        let expected = "STARWIRE_STATE_FROM and STARWIRE_STATE conflict: the state needs a folder: set both, or none";
        assert!(text.contains(expected), "{text}");
    }
}

#[test]
fn only_a_server_that_keeps_a_state_takes_one_over() {
    let from = env().set("STARWIRE_STATE_FROM", "move=ps-0:2222").set("STARWIRE_STATE", "/folder");
    let read = |env: &MapEnv, job: &str, protocol| from_env(env, Identity { protocol, ..identity(job, 4) });
    let named = from.clone().set("STARWIRE_PS_JOBS", "server");
    for (env, job) in [(&from, "ps"), (&named, "server")] {
        assert!(read(env, job, Protocol::StarServer).unwrap().state.is_some_and(|state| state.from.is_some()));
    }
    let others = [("server", Protocol::StarServer), ("worker", Protocol::StarServer), ("ps", Protocol::GrpcPlusPlus)];
    for (job, protocol) in others {
        let text = read(&from, job, protocol).unwrap_err().to_string();
        let expected = format!("STARWIRE_STATE_FROM is inconsistent: /job:{job}/replica:0/task:0 keeps no state");
        assert!(text.starts_with(&expected), "{text}");
        // Of an environment for all tasks, the others ignore it.
        let state = env().set("STARWIRE_STATE", "/folder");
        assert_eq!(read(&state, job, protocol).unwrap().state, None);
    }
}
