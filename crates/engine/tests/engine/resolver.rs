//! How peers are found and named: by the rule of docs/ports.md, and through an `.endpoint_map`.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::path::PathBuf;

use super::harness::*;
use super::one_port::CORE_SETTINGS;
use super::{PS, WORKER, count};

const LOCAL: &str = "/job:localhost/replica:0/task:0";
const OTHER: &str = "/job:ps/replica:0/task:1";
const TWO: (&str, &str) = ("STARWIRE_PORTS", "two");

fn patient() -> Options {
    Options { wait_for_ready: true, ..Options::default() }
}

/// A port with an offset, such that nobody listens on either.
fn free_ports(offset: u16) -> (u16, u16) {
    loop {
        let port = free_port();
        let data = port + offset;
        // Nobody draws ports in odd thousands.
        if data / 1000 % 2 == 1 && TcpListener::bind(("127.0.0.1", data)).is_ok() {
            return (port, data);
        }
    }
}

/// Speaks first, like the server of gRPC.
fn grpc_server() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for mut stream in listener.incoming().map_while(Result::ok) {
            let _ = stream.write_all(CORE_SETTINGS);
            let _ = stream.read(&mut [0; 1000]);
        }
    });
    address
}

fn ask(worker: &Task, task: &str, address: &str) -> End {
    call(&worker.engine().channel(task, address).unwrap(), ECHO, b"hello", None)
}

// Without a map.

#[test]
fn a_client_may_call_a_server_by_any_name() {
    for unix in ["auto", "off"] {
        let server = Task::start(LOCAL, &[]);
        let client = Task::start(WORKER, &[("STARWIRE_UNIX", unix)]);
        // The first name is from the client's own cluster, the others from sessions.
        let names = [PS, "/job:remote_device/replica:0/task:1", "/job:my_ps/replica:0/task:3", LOCAL];
        for name in names {
            client.knows(name, &server);
        }
        let channels = names.map(|name| client.channel(name));
        for (name, channel) in names.iter().zip(&channels) {
            let end = call(channel, ECHO, name.as_bytes(), None);
            assert_eq!((end.code, &end.meta[..]), (0, name.as_bytes()), "{unix}: {}", end.message);
        }
        for (name, channel) in names.iter().zip(&channels) {
            assert_eq!(call(channel, ECHO, name.as_bytes(), None).meta, name.as_bytes(), "all at once");
        }
        assert_eq!(client.logged(&format!("{PS} ({}) reports its name as {LOCAL}", server.address())), 1);
        assert_eq!(client.logged("reports its name as"), 3, "its own name is not worth a line");
        assert_eq!(client.logged("check job_name"), 0);
    }
}

#[test]
fn two_swapped_servers_are_a_warning() {
    let server = Task::start(PS, &[]);
    let client = Task::start(WORKER, &[]);
    client.knows(OTHER, &server);
    assert_eq!(call(&client.channel(OTHER), ECHO, b"", None).code, 0);
    let line = format!("{OTHER} ({}) reports its name as {PS}, which is at {ELSEWHERE}", server.address());
    assert_eq!(client.logged(&line), 1);
}

#[test]
fn a_restarted_server_is_found_under_any_name() {
    let mut server = Task::start(LOCAL, &[]);
    let client = Task::start(WORKER, &[]);
    client.knows(PS, &server);
    let channel = client.channel(PS);
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    let address = server.address();
    server.stop();
    assert_eq!(call(&channel, ECHO, b"", None).code, 14);
    let _again = Task::start_at("/job:another/replica:0/task:0", 2, &[], &address);
    assert_eq!(call_with(&channel, ECHO, b"", None, &patient()).1.wait().code, 0);
    eventually("a line about it", || client.logged(&format!("{PS} was restarted")) == 1);
}

#[test]
fn with_two_ports_the_data_port_is_at_the_offset() {
    for (offset, host, unix) in
        [("1000", "127.0.0.1", "auto"), ("77", "127.0.0.1", "off"), ("1000", "localhost", "auto")]
    {
        let (port, data) = free_ports(offset.parse().unwrap());
        let env = [TWO, ("STARWIRE_PORT_OFFSET", offset), ("STARWIRE_UNIX", unix)];
        let server = Task::start_at(PS, 1, &env, &format!("127.0.0.1:{port}"));
        assert_eq!(server.address(), format!("127.0.0.1:{data}"));
        let client = Task::start(WORKER, &env);
        let end = ask(&client, PS, &format!("{host}:{port}"));
        assert_eq!((end.code, &end.meta[..]), (0, &b"hello"[..]), "{}", end.message);
        assert_eq!(unix_sockets(&server), if unix == "auto" { 2 } else { 0 }, "the listener and the connection");
    }
}

#[test]
fn a_failure_names_the_data_port() {
    let (port, data) = free_ports(1000);
    let client = Task::start(WORKER, &[TWO, ("STARWIRE_UNIX", "off")]);
    let end = ask(&client, PS, &format!("127.0.0.1:{port}"));
    assert_eq!(end.code, 14, "{}", end.message);
    assert!(end.message.ends_with(&format!(" (data port 127.0.0.1:{data})")), "{}", end.message);
    // Another kind of server: waiting does not help.
    let grpc = grpc_server();
    let (host, number) = grpc.rsplit_once(':').unwrap();
    let address = format!("{host}:{}", number.parse::<u16>().unwrap() - 1000);
    let channel = client.engine().channel(PS, &address).unwrap();
    let end = call_with(&channel, ECHO, b"", None, &patient()).1.wait();
    assert_eq!(end.code, 9, "{}", end.message);
    for words in [PS, &address, "protocol=\"grpc++\" and two ports", &format!("(data port {grpc})")] {
        assert!(end.message.contains(words), "{words}: {}", end.message);
    }
}

#[test]
fn a_task_without_a_data_port_is_an_error() {
    let client = Task::start(WORKER, &[TWO]);
    for (address, words) in [
        ("ps0:65000", "no data port for the ClusterSpec address ps0:65000: its port and STARWIRE_PORT_OFFSET, 1000"),
        ("nowhere", "the ClusterSpec address \"nowhere\" of /job:ps/replica:0/task:0 is unusable"),
    ] {
        let error = client.engine().channel(PS, address).map(drop).unwrap_err();
        assert!(error.code() == 3 && error.to_string().contains(words), "{error}");
    }
    for addresses in [["127.0.0.1:65000", ELSEWHERE], ["localhost:0", "ps0:65000"]] {
        let started = Task::start_behind(WORKER, "grpc++", 1, &[TWO], addresses, |_| {});
        let error = started.map(drop).unwrap_err();
        assert!(error.code() == 3 && error.to_string().contains(":65000: its port and"), "{error}");
        assert!(Task::start_behind(WORKER, "grpc++", 1, &[], ["localhost:0", addresses[1]], |_| {}).is_ok());
    }
}

// With a map.

/// A worker with a map in which `data` is the data address of the task at somewhere:1 (line 3).
struct Mapped {
    worker: Task,
    path: PathBuf,
}

impl Mapped {
    fn start(name: &str, data: &str, env: &[(&str, &str)]) -> Self {
        let path = std::env::temp_dir().join(format!("starwire-resolver-{}-{name}", std::process::id()));
        let lines = format!("# data ports\nlocalhost:0=127.0.0.1:{}\n{ELSEWHERE}={data}\n", free_port());
        std::fs::write(&path, lines).unwrap();
        let worker = Task::start(WORKER, &[&[("STARWIRE_ENDPOINT_MAP", path.to_str().unwrap())][..], env].concat());
        Self { worker, path }
    }

    fn place(&self) -> String {
        format!("{}:3", self.path.display())
    }

    fn channel(&self, task: &str) -> Channel {
        self.worker.engine().channel(task, ELSEWHERE).unwrap()
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

#[test]
fn a_line_that_leads_nowhere_is_named() {
    for (name, wrong) in [("port", format!("127.0.0.1:{}", free_port())), ("name", "no-such-host.invalid:3333".into())]
    {
        let mapped = Mapped::start(name, &wrong, &[]);
        let end = call(&mapped.channel(PS), ECHO, b"", None);
        assert_eq!(end.code, 14, "{}", end.message);
        for words in [PS, ELSEWHERE, &format!(" ({} gives data port {wrong})", mapped.place())] {
            assert!(end.message.contains(words), "{words}: {}", end.message);
        }
    }
}

#[test]
fn a_line_for_another_kind_of_server_is_an_error() {
    let address = grpc_server();
    let mapped = Mapped::start("not-ours", &address, &[]);
    let end = call_with(&mapped.channel(PS), ECHO, b"", None, &patient()).1.wait();
    assert_eq!(end.code, 9, "{}", end.message);
    for words in [&mapped.place(), &address, "protocol=\"grpc++\""] {
        assert!(end.message.contains(words), "{words}: {}", end.message);
    }
}

#[test]
fn another_protocol_at_the_mapped_address_is_named() {
    let star = Task::try_start(PS, "star_server", 1, &[]).unwrap();
    let mapped = Mapped::start("protocol", &star.address(), &[]);
    let end = call_with(&mapped.channel(PS), ECHO, b"", None, &patient()).1.wait();
    assert_eq!(end.code, 9, "{}", end.message);
    for words in ["star_server", "grpc++", &mapped.place()] {
        assert!(end.message.contains(words), "{words}: {}", end.message);
    }
}

#[test]
fn a_mapped_peer_that_is_not_up_is_waited_for() {
    let address = format!("127.0.0.1:{}", free_port());
    let mapped = Mapped::start("late", &address, &[]);
    let channel = mapped.channel(PS);
    for incarnation in [3, 4] {
        let (_, waiter) = call_with(&channel, ECHO, b"at last", None, &patient());
        let failures = count(&mapped.worker, "starwire_connect_failures_total");
        eventually("attempts fail", || count(&mapped.worker, "starwire_connect_failures_total") > failures + 2);
        assert!(!waiter.is_done(), "{:?}", waiter.wait());
        let mut server = Task::start_at(PS, incarnation, &[], &address);
        assert_eq!(waiter.wait().meta, b"at last");
        server.stop();
        eventually("the loss", || count(&mapped.worker, "starwire_connections_out") == 0);
    }
    assert_eq!(mapped.worker.logged(&format!("{PS} was restarted")), 1);
}

#[test]
fn the_map_leads_to_servers_with_other_names_too() {
    let server = Task::start(OTHER, &[]);
    let mapped = Mapped::start("renamed", &server.address(), &[]);
    // From the client's own cluster, and from one that a session brought.
    for name in [PS, "/job:my_ps/replica:0/task:3"] {
        let end = call(&mapped.channel(name), ECHO, b"found", None);
        assert_eq!((end.code, &end.meta[..]), (0, &b"found"[..]), "{name}: {}", end.message);
        assert_eq!(mapped.worker.logged(&format!("{name} ({ELSEWHERE}) reports its name as {OTHER}")), 1);
    }
}

#[test]
fn the_map_leads_past_the_unix_socket() {
    let unix = ("STARWIRE_UNIX", "auto");
    let server = Task::start(PS, &[unix]);
    let mapped = Mapped::start("tcp", &server.address(), &[unix]);
    assert_eq!(call(&mapped.channel(PS), ECHO, b"found", None).meta, b"found");
    assert_eq!(unix_sockets(&server), 1, "the listener alone");
}

#[test]
fn with_a_secret_a_line_leads_to_its_task_only() {
    let secret = ("STARWIRE_SECRET", "a-secret-of-enough-length");
    let server = Task::start(OTHER, &[secret]);
    let mapped = Mapped::start("swapped", &server.address(), &[secret]);
    let end = call(&mapped.channel(PS), ECHO, b"", None);
    assert_eq!(end.code, 9, "{}", end.message);
    for words in [PS, OTHER, &mapped.place(), "the name that the ClusterSpec gives it"] {
        assert!(end.message.contains(words), "{words}: {}", end.message);
    }
}

#[test]
fn a_task_without_a_line_is_an_error() {
    let mapped = Mapped::start("missing", "127.0.0.1:1", &[]);
    let error = mapped.worker.engine().channel(OTHER, "elsewhere:1").map(drop).unwrap_err();
    assert_eq!(error.code(), 3);
    let words = format!("{}: no line for {OTHER}, whose ClusterSpec address is elsewhere:1", mapped.path.display());
    assert!(error.to_string().contains(&words), "{error}");
}
