//! How peers are found and named: through their advertised addresses, and through an `.endpoint_map`.

use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use starwire_engine::config::Advertisement;

use super::harness::*;
use super::{PS, WORKER};

const LOCAL: &str = "/job:localhost/replica:0/task:0";
const OTHER: &str = "/job:ps/replica:0/task:1";

fn patient() -> Options {
    Options { wait_for_ready: true, ..Options::default() }
}

fn advertisement(task: &Task, change: impl FnOnce(&mut Advertisement)) -> String {
    let mut said: Advertisement = task.engine().advertisement().parse().unwrap();
    change(&mut said);
    said.to_string()
}

/// A port that nobody listens on, and that no other call has returned.
fn free_port() -> u16 {
    static GIVEN: Mutex<Vec<u16>> = Mutex::new(Vec::new());
    let mut given = GIVEN.lock().unwrap();
    loop {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if !given.contains(&port) {
            given.push(port);
            return port;
        }
    }
}

/// A worker with a map in which `data` is the data address of the task at somewhere:1 (line 3).
struct Mapped {
    worker: Task,
    path: PathBuf,
}

impl Mapped {
    fn start(name: &str, data: &str) -> Self {
        let path = std::env::temp_dir().join(format!("starwire-whereabouts-{}-{name}", std::process::id()));
        let lines = format!("# data ports\nlocalhost:0=127.0.0.1:{}\nsomewhere:1={data}\n", free_port());
        std::fs::write(&path, lines).unwrap();
        let worker = Task::start(WORKER, &[("STARWIRE_ENDPOINT_MAP", path.to_str().unwrap())]);
        Self { worker, path }
    }

    fn place(&self) -> String {
        format!("{}:3", self.path.display())
    }

    /// Makes a call that waits until the peer is ready; returns its end and duration.
    fn patient_call(&self, task: &str) -> (End, Duration) {
        let begin = Instant::now();
        let end = call_with(&self.worker.channel(task), ECHO, b"hello", None, &patient()).1.wait();
        (end, begin.elapsed())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

fn ps_at(name: &str, incarnation: u64, port: u16) -> Task {
    let bind = format!("127.0.0.1:{port}");
    Task::try_start(name, "grpc++", incarnation, &[("STARWIRE_BIND", &bind), ("STARWIRE_ADVERTISE", &bind)]).unwrap()
}

// Without a map.

#[test]
fn a_client_may_call_a_server_by_any_name() {
    for unix in ["auto", "off"] {
        let server = Task::start(LOCAL, &[]);
        let client = Task::start(WORKER, &[("STARWIRE_UNIX", unix)]);
        // The first name is from the client's own cluster, the others from sessions.
        let names = [PS, "/job:remote_device/replica:0/task:1", "/job:my_ps/replica:0/task:3", LOCAL];
        let channels: Vec<_> = names.iter().map(|name| client.channel(name)).collect();
        for (name, channel) in names.iter().zip(&channels) {
            client.knows(name, &server);
            let end = call(channel, ECHO, name.as_bytes(), None);
            assert_eq!((end.code, &end.meta[..]), (0, name.as_bytes()), "{unix}: {}", end.message);
        }
        for (name, channel) in names.iter().zip(&channels) {
            assert_eq!(call(channel, ECHO, name.as_bytes(), None).meta, name.as_bytes(), "all at once");
        }
        assert_eq!(client.logged(&format!("{PS} (somewhere:1) reports its name as {LOCAL}")), 1);
        assert_eq!(client.logged("reports its name as"), 3, "its own name is not worth a line");
        assert_eq!(client.logged("check job_name"), 0);
    }
}

#[test]
fn two_swapped_servers_are_a_warning() {
    let server = Task::start(PS, &[]);
    let client = Task::start(WORKER, &[]);
    client.knows(OTHER, &server);
    let channel = client.engine().channel(OTHER, "elsewhere:1").unwrap();
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    assert_eq!(client.logged(&format!("{OTHER} (elsewhere:1) reports its name as {PS}, which is at somewhere:1")), 1);
}

#[test]
fn a_restarted_server_is_found_under_any_name() {
    let mut server = Task::start(LOCAL, &[]);
    let client = Task::start(WORKER, &[]);
    client.knows(PS, &server);
    let channel = client.channel(PS);
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    server.stop();
    assert_eq!(call(&channel, ECHO, b"", None).code, 14);
    let again = Task::try_start("/job:another/replica:0/task:0", "grpc++", 2, &[]).unwrap();
    client.knows(PS, &again);
    assert_eq!(call_with(&channel, ECHO, b"", None, &patient()).1.wait().code, 0);
    eventually("a line about it", || client.logged(&format!("{PS} was restarted")) == 1);
}

#[test]
fn a_usurped_advertised_address_is_noticed() {
    // A successor, with the same or another name, now has the data port that a dead server advertised.
    for successor in [LOCAL, OTHER] {
        let server = Task::start(LOCAL, &[("STARWIRE_UNIX", "off")]);
        let usurper = Task::try_start(successor, "grpc++", 77, &[("STARWIRE_UNIX", "off")]).unwrap();
        let client = Task::start(WORKER, &[]);
        client.knows(PS, &server);
        let last_word = advertisement(&server, |said| {
            said.incarnation = 5;
            said.data = usurper.engine().advertisement().parse::<Advertisement>().unwrap().data;
        });
        client.seen.first.lock().unwrap().push(Ok(last_word));
        // Invisible to the caller: the current advertisement leads to the server.
        let end = call(&client.channel(PS), ECHO, b"mine", None);
        assert_eq!((end.code, &end.meta[..]), (0, &b"mine"[..]), "{}", end.message);
        assert_eq!(client.logged(&format!("reports its name as {LOCAL}")), 1);
        assert_eq!(client.seen.asked(), 2);
    }
}

#[test]
fn an_advertised_address_of_another_server_is_an_error() {
    for successor in [LOCAL, OTHER] {
        let usurper = Task::try_start(successor, "grpc++", 77, &[("STARWIRE_UNIX", "off")]).unwrap();
        let client = Task::start(WORKER, &[]);
        let wrong = advertisement(&usurper, |said| {
            said.incarnation = 5;
            said.task = LOCAL.into();
        });
        client.seen.addresses.lock().unwrap().push((PS.into(), Ok(wrong)));
        let end = call_with(&client.channel(PS), ECHO, b"", None, &patient()).1.wait();
        assert_eq!(end.code, 9, "{}", end.message);
        for words in [PS, "somewhere:1", LOCAL, successor, "STARWIRE_ADVERTISE"] {
            assert!(end.message.contains(words), "{}", end.message);
        }
        assert_eq!(client.seen.asked(), 2, "asked once more, and not for ever");
    }
}

// With a map.

#[test]
fn a_line_that_leads_nowhere_is_an_error_once_the_peer_is_up() {
    let server = Task::start(PS, &[]);
    let said = advertisement(&server, |_| ());
    let data = said.parse::<Advertisement>().unwrap().data[0].to_string();
    for (name, wrong) in [("port", format!("127.0.0.1:{}", free_port())), ("name", "no-such-host.invalid:3333".into())]
    {
        let mapped = Mapped::start(name, &wrong);
        mapped.worker.knows(PS, &server);
        let (end, took) = mapped.patient_call(PS);
        assert_eq!(end.code, 9, "{}", end.message);
        for words in [PS, "somewhere:1", &mapped.place(), &wrong, &data] {
            assert!(end.message.contains(words), "{words}: {}", end.message);
        }
        assert!(took > Duration::from_secs(2), "{took:?}");
        // A request that does not wait fails at once, with another code.
        let end = call(&mapped.worker.channel(PS), ECHO, b"", None);
        assert_eq!(end.code, 14, "{end:?}");
    }
}

#[test]
fn a_line_for_another_kind_of_server_is_an_error() {
    let server = Task::start(PS, &[]);
    // Like TensorFlow's gRPC port: accepts connections, and closes those that speak another protocol.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || listener.incoming().for_each(drop));
    let mapped = Mapped::start("not-ours", &address);
    mapped.worker.knows(PS, &server);
    let (end, _) = mapped.patient_call(PS);
    assert_eq!(end.code, 9, "{}", end.message);
    assert!(end.message.contains(&mapped.place()) && end.message.contains(&address), "{}", end.message);
}

#[test]
fn a_peer_without_a_data_port_is_an_error_that_names_the_line() {
    let mapped = Mapped::start("stock", &format!("127.0.0.1:{}", free_port()));
    let stock = "it does not offer protocol grpc++: start it with protocol=\"grpc++\"";
    mapped.worker.seen.addresses.lock().unwrap().push((PS.into(), Err((9, stock.into()))));
    let (end, _) = mapped.patient_call(PS);
    assert_eq!(end.code, 9, "{}", end.message);
    assert!(end.message.contains(&mapped.place()) && end.message.contains(stock), "{}", end.message);
}

#[test]
fn a_mapped_peer_that_is_not_up_is_waited_for() {
    let port = free_port();
    let mapped = Mapped::start("late", &format!("127.0.0.1:{port}"));
    let channel = mapped.worker.channel(PS);
    let (_, waiter) = call_with(&channel, ECHO, b"at last", None, &patient());
    std::thread::sleep(Duration::from_secs(5));
    assert!(!waiter.is_done(), "{:?}", waiter.wait());
    let server = ps_at(PS, 3, port);
    mapped.worker.knows(PS, &server);
    assert_eq!(waiter.wait().meta, b"at last");
}

#[test]
fn a_mapped_peer_that_was_met_before_is_waited_for() {
    let port = free_port();
    let mapped = Mapped::start("outage", &format!("127.0.0.1:{port}"));
    let mut server = ps_at(PS, 3, port);
    mapped.worker.knows(PS, &server);
    let channel = mapped.worker.channel(PS);
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    // Its gRPC port keeps answering, so this looks like a network failure between the data ports.
    server.stop();
    let (_, waiter) = call_with(&channel, ECHO, b"again", None, &patient());
    std::thread::sleep(Duration::from_secs(5));
    assert!(!waiter.is_done(), "{:?}", waiter.wait());
    let again = ps_at(PS, 4, port);
    mapped.worker.knows(PS, &again);
    assert_eq!(waiter.wait().meta, b"again");
}

#[test]
fn swapped_lines_are_named() {
    let port = free_port();
    let mapped = Mapped::start("swapped", &format!("127.0.0.1:{port}"));
    let (_other, server) = (ps_at(OTHER, 3, port), Task::start(PS, &[]));
    mapped.worker.knows(PS, &server);
    let end = call(&mapped.worker.channel(PS), ECHO, b"", None);
    assert_eq!(end.code, 9, "{}", end.message);
    for words in [PS, OTHER, &mapped.place(), "check .endpoint_map"] {
        assert!(end.message.contains(words), "{}", end.message);
    }
}

#[test]
fn the_map_leads_to_servers_with_other_names_too() {
    let port = free_port();
    let mapped = Mapped::start("renamed", &format!("127.0.0.1:{port}"));
    let mut server = ps_at(LOCAL, 3, port);
    // From the client's own cluster, and from one that a session brought.
    for name in [PS, "/job:my_ps/replica:0/task:3"] {
        mapped.worker.knows(name, &server);
        let end = call(&mapped.worker.channel(name), ECHO, b"found", None);
        assert_eq!((end.code, &end.meta[..]), (0, &b"found"[..]), "{name}: {}", end.message);
    }
    // Another process with that name takes over the data port; the server behind the gRPC port has another incarnation.
    let advertised = advertisement(&server, |_| ());
    server.stop();
    let _usurper = ps_at(LOCAL, 9, port);
    for name in [PS, "/job:my_ps/replica:0/task:3"] {
        mapped.worker.seen.addresses.lock().unwrap().push((name.into(), Ok(advertised.clone())));
        eventually("the loss", || call(&mapped.worker.channel(name), ECHO, b"", None).code == 9);
    }
}

#[test]
fn another_protocol_at_the_mapped_address_is_named() {
    let port = free_port();
    let mapped = Mapped::start("protocol", &format!("127.0.0.1:{port}"));
    let bind = format!("127.0.0.1:{port}");
    let star = Task::try_start(PS, "star_server", 1, &[("STARWIRE_BIND", &bind)]).unwrap();
    mapped.worker.knows(PS, &star);
    let (end, took) = mapped.patient_call(PS);
    assert_eq!(end.code, 9, "{}", end.message);
    for words in ["star_server", "grpc++", &mapped.place()] {
        assert!(end.message.contains(words), "{}", end.message);
    }
    assert!(took < Duration::from_secs(5), "{took:?}");
}
