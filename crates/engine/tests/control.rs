//! The control service over real loopback sockets: a `Door` reads the first bytes as a reactor does, and clients of
//! every kind connect to it.

#![allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use starwire_engine::config::{OwnNames, Setting};
use starwire_engine::control::proto::health::health_check_response::ServingStatus;
use starwire_engine::control::proto::health::health_client::HealthClient;
use starwire_engine::control::proto::health::{HealthCheckRequest, HealthCheckResponse};
use starwire_engine::control::proto::starwire as pb;
use starwire_engine::control::proto::starwire::control_client::ControlClient;
use starwire_engine::control::{ControlAccess, ControlError, ControlService, ControlState, HttpLimits, ServerFacts};
use starwire_engine::metrics::{ConnectionFacts, Connections, Direction, Metrics, PeerFacts, Sample, State};
use starwire_net::reactor::topology::Topology;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request};

const PATIENCE: Duration = Duration::from_secs(60);

struct Fake {
    metrics: Metrics,
    connections: Arc<Connections>,
    refused: Mutex<Vec<String>>,
}

impl ControlState for Fake {
    fn passed_on(&self) {}

    fn handshake_delayed(&self) {}

    fn refused(&self, client: &str, why: &ControlError) {
        self.refused.lock().unwrap().push(format!("{client}: {why}"));
    }

    fn answers_to(&self, authority: &str) -> bool {
        OwnNames::new(["ps0.test"], Vec::new()).include(authority)
    }

    fn server(&self) -> ServerFacts {
        ServerFacts {
            protocol: "grpc++".to_owned(),
            task: "/job:ps/replica:0/task:0".to_owned(),
            incarnation: u64::MAX,
            banner: "starwire: …".to_owned(),
            uptime: Duration::from_secs(5),
            moved_to: None,
            certificate_ends: None,
        }
    }

    fn metrics(&self) -> Vec<Sample> {
        self.metrics.snapshot()
    }

    fn connections(&self) -> Vec<ConnectionFacts> {
        self.connections.list()
    }

    fn peers(&self) -> Vec<PeerFacts> {
        self.connections.peers()
    }

    fn settings(&self) -> Vec<Setting> {
        vec![Setting { name: "STARWIRE_SECRET", value: "set".to_owned(), is_default: false }]
    }
}

fn fake() -> Arc<Fake> {
    Arc::new(Fake { metrics: Metrics::default(), connections: Arc::default(), refused: Mutex::default() })
}

/// Accepts connections, reads the first bytes of each, and passes it to the service.
struct Door {
    address: SocketAddr,
    service: Arc<ControlService>,
    thread: Option<JoinHandle<()>>,
}

impl Door {
    fn open(service: ControlService) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let service = Arc::new(service);
        let thread = std::thread::spawn({
            let service = Arc::clone(&service);
            move || {
                for stream in listener.incoming() {
                    let mut stream = stream.unwrap();
                    let mut first = [0; 24];
                    let Ok(n @ 1..) = stream.read(&mut first) else { return };
                    stream.set_nonblocking(true).unwrap();
                    let _ = service.handle(stream.into(), first[..n].to_vec());
                }
            }
        });
        Self { address, service, thread: Some(thread) }
    }

    fn plain() -> Self {
        Self::open(ControlService::new(fake(), ControlAccess::Everybody))
    }

    fn connect(&self) -> TcpStream {
        connect(self.address)
    }

    /// Sends one HTTP/1.1 request on a new connection; returns the whole answer.
    fn get(&self, path: &str) -> String {
        get(self.address, path)
    }

    async fn channel(&self) -> Channel {
        Endpoint::from_shared(format!("http://{}", self.address)).unwrap().timeout(PATIENCE).connect().await.unwrap()
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.service.stop();
        // A connection without bytes ends the thread.
        drop(TcpStream::connect(self.address));
        self.thread.take().unwrap().join().unwrap();
    }
}

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = connect(address);
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    read_all(&mut stream)
}

fn read_all(stream: &mut impl Read) -> String {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("the connection was not closed: {error}; so far: {:?}", String::from_utf8_lossy(&bytes)),
    }
    String::from_utf8(bytes).unwrap()
}

fn run<F: Future>(future: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { tokio::time::timeout(PATIENCE, future).await.expect("took too long") })
}

fn check(service: &str) -> Request<HealthCheckRequest> {
    Request::new(HealthCheckRequest { service: service.to_owned() })
}

#[test]
fn plain_http_serves_metrics_and_liveness() {
    let state = fake();
    state.metrics.recorder().calls_sent.add(7);
    let door = Door::open(ControlService::new(state, ControlAccess::Everybody));
    let metrics = door.get("/metrics");
    assert!(metrics.starts_with("HTTP/1.1 200 OK\r\n"), "{metrics}");
    assert!(metrics.contains("content-type: text/plain; version=0.0.4; charset=utf-8\r\n"));
    let line = "starwire_calls_sent_total{protocol=\"grpc++\",task=\"/job:ps/replica:0/task:0\"} 7\n";
    assert!(metrics.contains(line), "{metrics}");
    let build = metrics.lines().find(|line| line.starts_with("starwire_build_info{")).unwrap();
    assert!(build.starts_with("starwire_build_info{protocol=\"grpc++\",task=\"/job:ps/replica:0/task:0\",version=\""));
    assert!(build.contains(&format!("version=\"{}\",wire_version=\"", env!("CARGO_PKG_VERSION"))), "{build}");
    assert!(build.ends_with("\"} 1"), "{build}");
    let mut stream = connect(door.address);
    let asks = "text/plain;q=0.5,application/openmetrics-text;version=1.0.0";
    write!(stream, "GET /metrics HTTP/1.1\r\nhost: localhost\r\naccept: {asks}\r\nconnection: close\r\n\r\n").unwrap();
    let metrics = read_all(&mut stream);
    assert!(metrics.contains("content-type: application/openmetrics-text; version=1.0.0; charset=utf-8\r\n"));
    assert!(metrics.contains("# TYPE starwire_calls_sent counter\n") && metrics.contains(line), "{metrics}");
    assert!(metrics.contains("# TYPE process_cpu_seconds counter\n"), "{metrics}");
    assert!(metrics.ends_with("# EOF\n"));
    assert!(door.get("/healthz").ends_with("\r\n\r\nok\n"));
    assert!(door.get("/metrics/x").starts_with("HTTP/1.1 404 "));
}

#[test]
fn metrics_tell_of_peers_and_of_the_process() {
    let state = fake();
    let entry = state.connections.enter(Direction::Incoming, State::Ready, "10.0.0.1:5", 0);
    entry.set_peer("/job:worker/task:1");
    entry.add_bytes_in(42);
    let door = Door::open(ControlService::new(state, ControlAccess::Everybody));
    let metrics = door.get("/metrics");
    let own = "protocol=\"grpc++\",task=\"/job:ps/replica:0/task:0\"";
    let line = format!("\nstarwire_peer_bytes_received_total{{{own},peer=\"/job:worker/task:1\"}} 42\n");
    assert!(metrics.contains(&line), "{metrics}");
    assert!(metrics.contains("\nprocess_resident_memory_bytes "), "{metrics}");
}

/// Nothing but the page itself, and it may load nothing.
#[test]
fn the_page_is_whole_and_confined() {
    let page = Door::plain().get("/");
    assert!(page.starts_with("HTTP/1.1 200 OK\r\ncontent-type: text/html; charset=utf-8\r\n"), "{page}");
    assert!(page.contains("\r\ncontent-security-policy: default-src 'none'; "), "{page}");
    let (_, text) = page.split_once("\r\n\r\n").unwrap();
    assert!(text.trim_end().ends_with("</html>"));
    for outside in ["src=", "@import", "url(", "innerHTML", "http:", "https:"] {
        assert!(!text.contains(outside), "the page contains {outside}");
    }
}

#[test]
fn several_requests_on_one_connection_in_any_pieces() {
    let door = Door::plain();
    let mut stream = door.connect();
    stream.set_nodelay(true).unwrap();
    let both = "GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\nGET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    // The first byte goes alone, so that replayed and fresh bytes mix within a request. Nothing tells that the server
    // has read it; if it has not, the test passes as well.
    let (first, rest) = both.as_bytes().split_at(1);
    stream.write_all(first).unwrap();
    std::thread::sleep(Duration::from_millis(30));
    stream.write_all(rest).unwrap();
    assert_eq!(read_all(&mut stream).matches("\r\n\r\nok\n").count(), 2);
}

#[test]
fn grpc_health_check() {
    let door = Door::plain();
    run(async {
        let mut client = HealthClient::new(door.channel().await);
        for service in ["", "grpc.health.v1.Health", "starwire.control.v1.Control"] {
            let reply = client.check(check(service)).await.unwrap().into_inner();
            assert_eq!(reply.status(), ServingStatus::Serving);
        }
        assert_eq!(client.check(check("other")).await.unwrap_err().code(), Code::NotFound);
        // Longer than any real request.
        let error = client.check(check(&"x".repeat(5000))).await.unwrap_err();
        assert_eq!(error.code(), Code::OutOfRange, "{error}");
    });
}

#[test]
fn grpc_health_watch_reports_the_end() {
    let door = Door::plain();
    run(async {
        let mut client = HealthClient::new(door.channel().await);
        let mut watch = client.watch(check("")).await.unwrap().into_inner();
        let mut unknown = client.watch(check("other")).await.unwrap().into_inner();
        let status = |reply: HealthCheckResponse| reply.status();
        assert_eq!(status(watch.message().await.unwrap().unwrap()), ServingStatus::Serving);
        assert_eq!(status(unknown.message().await.unwrap().unwrap()), ServingStatus::ServiceUnknown);
        let service = Arc::clone(&door.service);
        let stopper = std::thread::spawn(move || service.stop());
        assert_eq!(status(watch.message().await.unwrap().unwrap()), ServingStatus::NotServing);
        assert!(watch.message().await.unwrap().is_none(), "the stream ends in order");
        stopper.join().unwrap();
    });
}

#[test]
fn grpc_stats_include_everything() {
    let state = fake();
    state.metrics.recorder().bytes_sent.add(11);
    let entry = state.connections.enter(Direction::Incoming, State::Handshake, "10.0.0.9:5", 3);
    entry.set_peer("/job:worker/replica:0/task:1");
    entry.set_state(State::Ready);
    entry.add_bytes_in(13);
    let door = Door::open(ControlService::new(state, ControlAccess::Everybody));
    run(async {
        let mut client = ControlClient::new(door.channel().await);
        let reply = client.stats(pb::StatsRequest::default()).await.unwrap().into_inner();
        assert_eq!(reply.build.unwrap().version, env!("CARGO_PKG_VERSION"));
        let server = reply.server.unwrap();
        assert_eq!((server.protocol.as_str(), server.incarnation, server.uptime_ms), ("grpc++", u64::MAX, 5000));
        assert_eq!(server.pid, std::process::id());
        let sent = reply.metrics.iter().find(|m| m.name == "starwire_bytes_sent_total").unwrap();
        assert_eq!(sent.value, Some(pb::metric::Value::Counter(11)));
        let [connection] = &reply.connections[..] else { panic!("one connection expected") };
        assert_eq!(connection.direction(), pb::connection::Direction::Incoming);
        assert_eq!((connection.peer.as_str(), connection.state.as_str()), ("/job:worker/replica:0/task:1", "ready"));
        assert_eq!((connection.bytes_in, connection.reactor), (13, 3));
        assert_eq!(reply.settings[0].value, "set");
        let short = client.stats(pb::StatsRequest { without_connections: true }).await.unwrap().into_inner();
        assert!(short.connections.is_empty());
    });
}

#[test]
fn an_unknown_grpc_service_is_unimplemented() {
    let door = Door::plain();
    run(async {
        let mut grpc = tonic::client::Grpc::new(door.channel().await);
        grpc.ready().await.unwrap();
        let path = "/no.such.Service/Method".parse().unwrap();
        let codec = tonic_prost::ProstCodec::<pb::StatsRequest, pb::StatsReply>::default();
        let error = grpc.unary(Request::new(pb::StatsRequest::default()), path, codec).await.unwrap_err();
        assert_eq!(error.code(), Code::Unimplemented, "{error}");
    });
}

#[test]
fn unix_sockets_are_served_as_well() {
    let service = ControlService::new(fake(), ControlAccess::Loopback);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    theirs.set_read_timeout(Some(PATIENCE)).unwrap();
    service.handle(ours.into(), b"GET /healthz HTT".to_vec()).unwrap();
    theirs.write_all(b"P/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    assert!(read_all(&mut theirs).ends_with("ok\n"));
}

#[test]
fn access_can_be_denied() {
    for (access, allowed) in
        [(ControlAccess::Nobody, false), (ControlAccess::Loopback, true), (ControlAccess::Everybody, true)]
    {
        let door = Door::open(ControlService::new(fake(), access));
        let answer = door.get("/healthz");
        assert_eq!(answer.starts_with("HTTP/1.1 200 "), allowed, "{access:?}: {answer}");
        assert_eq!(answer.starts_with("HTTP/1.1 403 "), !allowed, "{access:?}: {answer}");
    }
}

/// The DNS server of a page in a browser can give any name this host's address, but not make it another name.
#[test]
fn requests_for_foreign_names_are_refused() {
    let state = fake();
    let door = Door::open(ControlService::new(state.clone(), ControlAccess::Loopback));
    let ask = |target: &str, hosts: &[&str]| {
        let mut stream = door.connect();
        let hosts: String = hosts.iter().map(|host| format!("host: {host}\r\n")).collect();
        write!(stream, "GET {target} HTTP/1.1\r\n{hosts}connection: close\r\n\r\n").unwrap();
        read_all(&mut stream)
    };
    for hosts in [&["127.0.0.1:2222"][..], &["[::1]:2222"], &["localhost"], &["PS0.test.:2222"], &[]] {
        assert!(ask("/healthz", hosts).starts_with("HTTP/1.1 200 "), "{hosts:?}");
    }
    assert!(ask("http://ps0.test/healthz", &["ps0.test"]).starts_with("HTTP/1.1 200 "));
    for path in ["/", "/metrics", "/healthz", "/nothing"] {
        for hosts in [&["evil.example:2222"][..], &["ps0.test.evil.example"], &["localhost", "evil.example"], &[""]] {
            let answer = ask(path, hosts);
            assert!(answer.starts_with("HTTP/1.1 421 "), "{path} {hosts:?}: {answer}");
            assert!(answer.contains("\r\n\r\nthe control service does not answer to the name \""), "{answer}");
            assert!(!answer.contains("/job:ps") && !answer.contains("ps0.test\""), "it tells names: {answer}");
        }
    }
    assert!(ask("http://evil.example/metrics", &["localhost"]).starts_with("HTTP/1.1 421 "));
    let long = "x".repeat(9000);
    let answer = ask("/metrics", &[&long]);
    assert!(answer.starts_with("HTTP/1.1 421 ") && answer.len() < 500, "{answer}");
    let refused = state.refused.lock().unwrap();
    assert!(refused[0].starts_with("127.0.0.1:") && refused[0].contains("\"evil.example:2222\""), "{refused:?}");
    assert_eq!(refused.len(), 18);
}

#[test]
fn grpc_for_a_foreign_name_is_refused() {
    let door = Door::plain();
    run(async {
        for (origin, is_own) in [("http://ps0.test:1", true), ("http://evil.example:1", false)] {
            let endpoint = Endpoint::from_shared(format!("http://{}", door.address)).unwrap();
            let channel = endpoint.origin(origin.parse().unwrap()).connect().await.unwrap();
            let answer = HealthClient::new(channel.clone()).check(check("")).await;
            let stats = ControlClient::new(channel).stats(pb::StatsRequest::default()).await;
            assert_eq!((answer.is_ok(), stats.is_ok()), (is_own, is_own));
            if let Err(error) = answer {
                assert_eq!(error.code(), Code::PermissionDenied);
                assert!(error.message().contains("does not answer to the name \"evil.example:1\""), "{error}");
            }
        }
    });
}

#[test]
fn the_oldest_connection_makes_way_for_a_newcomer() {
    let limits = HttpLimits { local: 2, ..HttpLimits::default() };
    let door = Door::open(ControlService::with_limits(fake(), ControlAccess::Everybody, limits));
    let mut held: Vec<TcpStream> = (0..2).map(|_| door.connect()).collect();
    for stream in &mut held {
        stream.write_all(b"GET ").unwrap();
    }
    wait_until(|| door.service.connections() == 2);
    assert!(door.get("/healthz").starts_with("HTTP/1.1 200 "));
    // The oldest was closed; the other is still served.
    assert_eq!(read_all(&mut held[0]), "");
    held[1].write_all(b"/healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").unwrap();
    assert!(read_all(&mut held[1]).starts_with("HTTP/1.1 200 "));
}

#[test]
fn idle_clients_that_answer_pings_do_not_starve_others() {
    let door = Door::plain();
    run(async {
        // More than there is room for, some with a request that never ends.
        let mut held = Vec::new();
        let mut watches = Vec::new();
        for n in 0..100 {
            let channel = door.channel().await;
            let mut client = HealthClient::new(channel.clone());
            client.check(check("")).await.unwrap();
            if n % 2 == 0 {
                watches.push(client.watch(check("")).await.unwrap());
            }
            held.push(channel);
        }
        assert!(door.service.connections() <= HttpLimits::default().local + 2, "{}", door.service.connections());
        for path in ["/healthz", "/metrics"].repeat(15) {
            let address = door.address;
            let answer = tokio::task::spawn_blocking(move || get(address, path)).await.unwrap();
            assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
        }
    });
}

#[test]
fn an_idle_client_that_answers_pings_is_disconnected() {
    let limits = HttpLimits { idle: Duration::from_secs(5), ..HttpLimits::default() };
    let door = Door::open(ControlService::with_limits(fake(), ControlAccess::Everybody, limits));
    run(async {
        let mut busy = HealthClient::new(door.channel().await);
        let mut watch = HealthClient::new(door.channel().await).watch(check("")).await.unwrap().into_inner();
        assert!(watch.message().await.unwrap().is_some());
        let mut idle = HealthClient::new(door.channel().await);
        let begun = Instant::now();
        idle.check(check("")).await.unwrap();
        while door.service.connections() > 2 {
            assert!(begun.elapsed() < PATIENCE / 2, "it stays");
            busy.check(check("")).await.unwrap();
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(begun.elapsed() > limits.idle);
        // A gRPC client reconnects when it needs to. A request that meets the connection's end fails with it.
        while idle.check(check("")).await.is_err() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(tokio::time::timeout(Duration::from_secs(1), watch.message()).await.is_err(), "a watch is a request");
    });
}

#[test]
fn silence_ends_a_connection_but_not_a_watch() {
    let limits = HttpLimits { idle: Duration::from_secs(3), pong: PATIENCE, ..HttpLimits::default() };
    let door = Door::open(ControlService::with_limits(fake(), ControlAccess::Everybody, limits));
    // One stops within the header, the other after a request.
    let mut within = door.connect();
    within.write_all(b"GET /healthz HTTP/1.1\r\nho").unwrap();
    let mut between = door.connect();
    between.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    run(async {
        let mut watch = HealthClient::new(door.channel().await).watch(check("")).await.unwrap().into_inner();
        assert!(watch.message().await.unwrap().is_some());
        let (within, between) =
            tokio::task::spawn_blocking(move || (read_all(&mut within), read_all(&mut between))).await.unwrap();
        assert!(!within.contains(" 200 "), "{within}");
        assert!(between.contains("\r\n\r\nok\n"), "{between}");
        // A client that answers pings may stay silent indefinitely.
        let more = tokio::time::timeout(Duration::from_secs(5), watch.message()).await;
        assert!(more.is_err(), "{more:?}");
    });
}

#[test]
fn a_header_that_does_not_end_is_refused() {
    let door = Door::plain();
    let mut stream = door.connect();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nx: ").unwrap();
    // The server may close while this side is still writing.
    let _ = stream.write_all(&vec![b'a'; 64 << 10]);
    let _ = stream.shutdown(Shutdown::Write);
    let answer = read_all(&mut stream);
    assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 431 "), "{answer}");
    wait_until(|| door.service.connections() == 0);
}

#[test]
fn garbage_ends_only_its_own_connection() {
    let door = Door::plain();
    for garbage in [
        &b"GET \r\n\r\n\r\n"[..],
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        b"POST \0\0\0\n\n",
    ] {
        let mut stream = door.connect();
        stream.write_all(garbage).unwrap();
        let _ = stream.shutdown(Shutdown::Write);
        let mut bytes = Vec::new();
        let _ = stream.read_to_end(&mut bytes);
        assert!(!String::from_utf8_lossy(&bytes).contains(" 200 "));
    }
    assert!(door.get("/healthz").starts_with("HTTP/1.1 200 "));
}

#[test]
fn stop_closes_everything_and_is_idempotent() {
    let door = Door::plain();
    let mut idle = door.connect();
    idle.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n").unwrap();
    wait_until(|| door.service.connections() == 1);
    door.service.stop();
    door.service.stop();
    read_all(&mut idle);
    assert_eq!(door.service.connections(), 0);
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let after = door.service.handle(OwnedFd::from(ours), Vec::new());
    assert!(matches!(after, Err(ControlError::Stopped)), "{after:?}");
}

#[test]
fn the_thread_stays_off_the_cpu_of_the_reactor_that_started_it() {
    let topology = Topology::detect().unwrap();
    let service = ControlService::new(fake(), ControlAccess::Everybody);
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.set_read_timeout(Some(PATIENCE)).unwrap();
    let pinned = std::thread::spawn({
        let topology = topology.clone();
        move || {
            topology.pin_current_thread(0).unwrap();
            service.handle(ours.into(), b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n".to_vec()).unwrap();
            service
        }
    });
    let service = pinned.join().unwrap();
    assert!(theirs.read(&mut [0; 100]).unwrap() > 0, "it serves");
    let of_this_process = allowed(&std::fs::read_to_string("/proc/thread-self/status").unwrap());
    for task in std::fs::read_dir("/proc/self/task").unwrap() {
        // Other tests' threads come and go.
        let Ok(status) = std::fs::read_to_string(task.unwrap().path().join("status")) else { continue };
        if status.starts_with("Name:\tstarwire-contro") {
            assert_eq!(allowed(&status), of_this_process);
        }
    }
    service.stop();
}

fn allowed(status: &str) -> String {
    status.lines().find(|line| line.starts_with("Cpus_allowed_list:")).unwrap().to_owned()
}

#[test]
fn a_service_that_was_never_used_has_no_thread() {
    let service = ControlService::new(fake(), ControlAccess::Everybody);
    service.stop();
    drop(service);
}

fn wait_until(condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < PATIENCE, "it did not happen in time");
        std::thread::sleep(Duration::from_millis(5));
    }
}
