//! Mutual TLS on the one port of tasks.

mod authority;
mod chains;
mod hellos;
mod http;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use super::harness::*;
use super::one_port::{OnePort, try_start, try_start_with};
use super::{PS, WORKER, count, pattern};
use authority::{Authority, Identity};

const TCP: (&str, &str) = ("STARWIRE_UNIX", "off");
const NAMES: (&str, &str) = ("STARWIRE_TLS_PEERS", "starwire://test/{job}/{task}");
const PS_NAME: &str = "starwire://test/ps/0";
const WORKER_NAME: &str = "starwire://test/worker/0";
const LONG: Duration = Duration::from_secs(3600);

fn start(name: &str, identity: &Identity, more: &[(&str, &str)]) -> OnePort {
    try_start(name, &identity.env(more), "127.0.0.1:0").unwrap()
}

/// A parameter server, and a worker that has its address in the ClusterSpec.
pub fn neighbours() -> (OnePort, OnePort, [Identity; 2]) {
    let authority = Authority::new("test");
    let identities = [authority.identity(PS_NAME), authority.identity(WORKER_NAME)];
    let ps = start(PS, &identities[0], &[TCP, NAMES]);
    let env = identities[1].env(&[TCP, NAMES]);
    let worker = try_start_with(WORKER, &env, ["127.0.0.1:0", &ps.address.to_string()]).unwrap();
    (ps, worker, identities)
}

fn channel(from: &OnePort, to: &OnePort) -> Channel {
    from.task.engine().channel(PS, &to.address.to_string()).unwrap()
}

/// A parameter server and a worker of one CA.
fn pair(more: &[(&str, &str)]) -> (OnePort, OnePort, [Identity; 2]) {
    let authority = Authority::new("test");
    let identities = [authority.identity(PS_NAME), authority.identity(WORKER_NAME)];
    let more = [&[TCP, NAMES], more].concat();
    (start(PS, &identities[0], &more), start(WORKER, &identities[1], &more), identities)
}

#[test]
fn payloads_of_every_size_arrive() {
    for driver in ["epoll", "io_uring"] {
        let (ps, worker, _files) = pair(&[("STARWIRE_DRIVER", driver)]);
        let channel = channel(&worker, &ps);
        let released = Arc::new(AtomicU64::new(0));
        let sizes = [0, 1, 4096, 8192, 16_383, 16_384, 16_385, 100_000, 245_760, 1 << 20, 30 << 20, 5];
        for (i, size) in sizes.iter().enumerate() {
            let bytes = pattern(*size, i as u8);
            let end = call(&channel, ECHO, b"hello", Some(payload(vec![bytes.clone()], &released)));
            assert_eq!((end.code, &end.meta[..]), (0, &b"hello"[..]), "{size}: {}", end.message);
            assert!(end.parts == vec![bytes], "{size} bytes over {driver}");
        }
        let many: Vec<Vec<u8>> = (0..300).map(|i| pattern(i * 197, i as u8)).collect();
        let end = call(&channel, ECHO, b"", Some(payload(many.clone(), &released)));
        assert!(end.parts == many, "many parts over {driver}");
        for step in 1..4 {
            let size = |i: usize| [0, 4, 4096, 8192, 20_000][i % 5];
            let waiters: Vec<_> =
                (0..1000).map(|i| (size(i), recv(&channel, step, &format!("k;{i};{}", size(i)), 0, 0).1)).collect();
            for (size, waiter) in waiters {
                let end = waiter.wait();
                assert!(end.code == 0 && end.parts == vec![vec![step as u8; size]], "{size}: {}", end.message);
            }
        }
        eventually("release", || released.load(Ordering::Relaxed) == sizes.len() as u64 + 1);
        for task in [&ps.task, &worker.task] {
            assert_eq!(count(task, "starwire_tls_handshakes_total"), 1);
            assert_eq!(count(task, "starwire_tls_failures_total"), 0);
        }
    }
}

#[test]
fn calls_in_both_directions_and_many_at_once() {
    for driver in ["epoll", "io_uring"] {
        let (ps, worker, _files) = pair(&[("STARWIRE_DRIVER", driver)]);
        let channel = channel(&worker, &ps);
        let released = Arc::new(AtomicU64::new(0));
        let send = |i: usize| {
            let parts = vec![pattern(300_000 + i, i as u8)];
            (call_with(&channel, ECHO, b"", Some(payload(parts.clone(), &released)), &Options::default()).1, parts)
        };
        for (waiter, parts) in (0..100).map(send).collect::<Vec<_>>() {
            let end = waiter.wait();
            assert!(end.code == 0 && end.parts == parts, "{}", end.message);
        }
        // A large reply that is cancelled midway.
        let (id, waiter) = call_with(&channel, SEND_MUCH, b"50000000", None, &Options::default());
        std::thread::sleep(Duration::from_millis(5));
        channel.cancel(id, 1, "enough".into());
        waiter.wait();
        assert_eq!(call(&channel, ECHO, b"still here", None).meta, b"still here");
    }
}

#[test]
fn on_one_host_the_kernel_vouches() {
    let authority = Authority::new("test");
    let (a, b) = (authority.identity(PS_NAME), authority.identity(WORKER_NAME));
    let (ps, worker) = (start(PS, &a, &[NAMES]), start(WORKER, &b, &[NAMES]));
    assert_eq!(call(&channel(&worker, &ps), ECHO, b"hello", None).meta, b"hello");
    if std::env::var_os("STARWIRE_TEST_TRANSPORT").is_none() {
        assert_eq!(count(&ps.task, "starwire_tls_handshakes_total"), 0);
    }
}

#[test]
fn a_secret_may_be_required_as_well() {
    let secret = ("STARWIRE_SECRET", "a-secret-of-enough-length");
    let (ps, worker, _files) = pair(&[secret]);
    assert_eq!(call(&channel(&worker, &ps), ECHO, b"hello", None).meta, b"hello");
    let (ps, _, _files) = pair(&[secret]);
    let end = call(&channel(&worker, &ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains("not issued by a CA"), "{end:?}");
}

#[test]
fn a_certificate_names_the_host_or_its_address() {
    let authority = Authority::new("test");
    let worker = authority.identity(WORKER_NAME);
    let worker = start(WORKER, &worker, &[TCP, ("STARWIRE_TLS_PEERS", "starwire://test/worker/0,{host}")]);
    let here = authority.identity("127.0.0.1");
    let ps = start(PS, &here, &[TCP, ("STARWIRE_TLS_PEERS", "{host},starwire://test/{job}/{task}")]);
    assert_eq!(call(&channel(&worker, &ps), ECHO, b"hello", None).meta, b"hello");
    // By default, only tasks of the ClusterSpec are tasks.
    let ps = start(PS, &here, &[TCP]);
    let end = call(&channel(&worker, &ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains("its address is not in this task's ClusterSpec"), "{end:?}");
}

#[test]
fn unusable_files_are_named_when_the_server_is_made() {
    let authority = Authority::new("test");
    let other = Authority::new("other");
    let (certificate, key) = authority.issue(PS_NAME, LONG);
    let (expired, its_key) = authority.issue_expired(PS_NAME);
    let (nobody, nobodys_key) = authority.issue("starwire://test/ps/7", LONG);
    let ca = authority.pem();
    for (certificate, key, authorities, words) in [
        ("", &key[..], &ca[..], &["STARWIRE_TLS_CERT", "cert.pem", "has no certificate in PEM format"][..]),
        (&certificate, "", &ca, &["STARWIRE_TLS_KEY", "key.pem", "has no private key in PEM format"]),
        (&certificate, &key, "", &["STARWIRE_TLS_CA", "ca.pem", "has no certificate in PEM format"]),
        (&certificate, &its_key, &ca, &["STARWIRE_TLS_KEY", "key.pem", "with the certificate in", "cert.pem"]),
        (&expired, &its_key, &ca, &["STARWIRE_TLS_CERT", "cert.pem", "it expired", "ago (by this machine's clock)"]),
        (&certificate, &key, &other.pem(), &["STARWIRE_TLS_CERT", "not issued by a CA of STARWIRE_TLS_CA"]),
        (&ca, &key, &ca, &["STARWIRE_TLS_CERT", "the certificate of a CA"]),
        (&nobody, &nobodys_key, &ca, &["names starwire://test/ps/7, so it does not speak for", "starwire://test/ps/0"]),
    ] {
        let files = Identity::of(certificate, key, authorities);
        let error = try_start(PS, &files.env(&[NAMES]), "127.0.0.1:0").map(drop).unwrap_err();
        for word in words {
            assert!(error.contains(word), "{word} in {error}");
        }
    }
    let files = Identity::of(&certificate, &key, &ca);
    for (without, word) in [("cert.pem", "CERT"), ("key.pem", "KEY"), ("ca.pem", "CA")] {
        std::fs::rename(files.folder().join(without), files.folder().join("away")).unwrap();
        let error = try_start(PS, &files.env(&[NAMES]), "127.0.0.1:0").map(drop).unwrap_err();
        assert!(error.contains(&format!("STARWIRE_TLS_{word} names ")) && error.contains("does not exist"), "{error}");
        std::fs::rename(files.folder().join("away"), files.folder().join(without)).unwrap();
    }
    let half = [("STARWIRE_TLS_CERT", "/x"), ("STARWIRE_TLS_CA", "/x")];
    let error = try_start(PS, &half, "127.0.0.1:0").map(drop).unwrap_err();
    assert!(error.contains("set STARWIRE_TLS_KEY as well"), "{error}");
    let two = [("STARWIRE_PORTS", "two"), NAMES];
    let error = Task::try_start(PS, "grpc++", 1, &files.env(&two)).map(drop).unwrap_err();
    assert!(error.code() == 3 && error.to_string().contains("set STARWIRE_PORTS=one"), "{error}");
    let verbs = [NAMES, ("STARWIRE_TRANSPORT", "verbs"), ("STARWIRE_TLS_ALLOW_RDMA", "false")];
    let error = try_start(PS, &files.env(&verbs), "127.0.0.1:0").map(drop).unwrap_err();
    assert!(error.contains("RDMA is not encrypted"), "{error}");
}

#[test]
fn foreign_certificates_are_refused_by_both_sides() {
    let (ours, theirs) = (Authority::new("ours"), Authority::new("theirs"));
    let both = format!("{}{}", ours.pem(), theirs.pem());
    let ps_files = ours.identity(PS_NAME);
    let ps = start(PS, &ps_files, &[TCP, NAMES]);
    // The client does not know the CA of the server.
    let files = theirs.identity(WORKER_NAME);
    let worker = start(WORKER, &files, &[TCP, NAMES]);
    let end = call(&channel(&worker, &ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains("the peer's certificate is refused: it was not issued"), "{end:?}");
    assert!(end.message.contains(PS) && end.message.contains(&ps.address.to_string()), "{end:?}");
    eventually("a line in the log", || ps.task.logged("the peer refused this task's certificate") == 1);
    // The server does not know that of the client.
    let (certificate, key) = theirs.issue(WORKER_NAME, LONG);
    let files = Identity::of(&certificate, &key, &both);
    let worker = start(WORKER, &files, &[TCP, NAMES]);
    let end = call(&channel(&worker, &ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains("not issued by a CA of the peer's STARWIRE_TLS_CA"), "{end:?}");
    assert_eq!(count(&ps.task, "starwire_tls_failures_total"), 2);
    assert_eq!(count(&ps.task, "starwire_accepts_total"), 0);
}

#[test]
fn certificates_that_expire_while_tasks_run_are_refused() {
    let authority = Authority::new("test");
    let files = authority.identity(WORKER_NAME);
    // It lasts until the server has started and a task is connected, however slow the machine is.
    let (ps, after, open, ends, _files) = (1..)
        .find_map(|seconds| {
            let ends = SystemTime::now() + Duration::from_secs(seconds);
            let (certificate, key) = authority.issue(PS_NAME, Duration::from_secs(seconds));
            let ps_files = Identity::of(&certificate, &key, &authority.pem());
            let ps = try_start(PS, &ps_files.env(&[TCP, NAMES]), "127.0.0.1:0").ok()?;
            let (before, after) = (start(WORKER, &files, &[TCP, NAMES]), start(WORKER, &files, &[TCP, NAMES]));
            let open = channel(&before, &ps);
            (call(&open, ECHO, b"hello", None).meta == b"hello").then_some((ps, after, (open, before), ends, ps_files))
        })
        .unwrap();
    eventually("it expires", || SystemTime::now() > ends + Duration::from_secs(1));
    let end = call(&channel(&after, &ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains("the peer's certificate is refused: it expired"), "{end:?}");
    // Connections that were open stay open.
    assert_eq!(call(&open.0, ECHO, b"hello", None).meta, b"hello");
}

#[test]
fn a_task_cannot_speak_in_the_name_of_another() {
    let authority = Authority::new("test");
    let (a, b) = (authority.identity(PS_NAME), authority.identity(WORKER_NAME));
    let ps = start(PS, &a, &[TCP, NAMES]);
    let everybody = ("STARWIRE_TLS_PEERS", "starwire://test/worker/0,starwire://test/ps/0");
    let liar = start("/job:worker/replica:0/task:1", &b, &[TCP, everybody]);
    let end = call(&channel(&liar, &ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains("does not speak for /job:worker/replica:0/task:1"), "{end:?}");
    assert_eq!(count(&ps.task, "starwire_accepts_total"), 0);
    // A server with the certificate of another task.
    let false_ps = start(PS, &b, &[TCP, everybody]);
    let worker = start(WORKER, &b, &[TCP, NAMES]);
    let end = call(&channel(&worker, &false_ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains("so it does not speak for /job:ps/replica:0/task:0"), "{end:?}");
    // A cluster may have one certificate.
    let one = ("STARWIRE_TLS_PEERS", WORKER_NAME);
    let (ps, worker) = (start(PS, &b, &[TCP, one]), start(WORKER, &b, &[TCP, one]));
    assert_eq!(call(&channel(&worker, &ps), ECHO, b"hello", None).meta, b"hello");
}

#[test]
fn a_task_joins_if_its_certificate_names_it() {
    let authority = Authority::new("test");
    let names = [PS_NAME, "starwire://test/worker/1", "starwire://test/worker/2"];
    let [server, first, second] = names.map(|name| authority.identity(name));
    let (joiner, join) = ("/job:worker/replica:0/task:1", ("STARWIRE_JOIN", "worker:3"));
    let ps = start(PS, &server, &[TCP, NAMES, join]);
    let newcomer = |identity: &Identity, names: (&'static str, &'static str)| {
        try_start(joiner, &identity.env(&[TCP, names]), &format!("127.0.0.1:{}", free_port())).unwrap()
    };
    let everybody = ("STARWIRE_TLS_PEERS", "starwire://test/worker/2,starwire://test/ps/0");
    let end = call(&channel(&newcomer(&second, everybody), &ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains(&format!("does not speak for {joiner}")), "{end:?}");
    assert!(ps.task.engine().channel_to_joined(joiner).is_err());
    let task = newcomer(&first, NAMES);
    assert_eq!(call(&channel(&task, &ps), ECHO, b"", None).code, 0);
    let back = ps.task.engine().channel_to_joined(joiner).unwrap();
    assert_eq!(call(&back, ECHO, b"back", None).meta, b"back");
    // The names of hosts say nothing about a task that is not in the ClusterSpec.
    let here = authority.identity("127.0.0.1");
    let ps = start(PS, &here, &[TCP, join]);
    let end = call(&channel(&start(joiner, &here, &[TCP]), &ps), ECHO, b"", None);
    assert!(end.code == 16 && end.message.contains("no certificate can"), "{end:?}");
}

#[test]
fn there_is_no_downgrade() {
    let (ps, worker, _files) = pair(&[]);
    let plain_ps = try_start(PS, &[TCP], "127.0.0.1:0").unwrap();
    let plain_worker = try_start(WORKER, &[TCP], "127.0.0.1:0").unwrap();
    for (from, to, words) in [
        (&plain_worker, &ps, "this port requires TLS, and the connection began without"),
        (&worker, &plain_ps, "the peer does not use TLS: set STARWIRE_TLS_CERT"),
    ] {
        // A call that waited for its deadline would end with another code.
        let patient = Options { wait_for_ready: true, deadline_ms: 50_000, ..Options::default() };
        let end = call_with(&channel(from, to), ECHO, b"secret words", None, &patient).1.wait();
        assert!(matches!(end.code, 9 | 16) && end.message.contains(words), "{end:?}");
    }
    assert_eq!(ps.task.logged("this port requires TLS, and it began without (a starwire task)"), 1);
    assert_eq!(plain_ps.task.logged("does not speak the starwire protocol (TLS, for which"), 1);
    // Neither do TLS 1.2 hellos, nor garbage.
    let mut old = ps.connect();
    let hello = [&[0x16, 3, 1, 0, 47, 1, 0, 0, 43, 3, 3], &[7; 32][..], &[0, 0, 4, 0, 0x2f, 0, 0xff, 1, 0]].concat();
    old.write_all(&hello).unwrap();
    let mut answer = Vec::new();
    let _ = old.read_to_end(&mut answer);
    assert!(answer.is_empty() || answer[0] == 0x15, "{answer:?}");
    let mut garbage = ps.connect();
    garbage.write_all(&[0x80; 300]).unwrap();
    assert_eq!(garbage.read(&mut [0; 10]).unwrap_or(0), 0);
}

#[test]
fn half_open_handshakes_shut_nobody_out() {
    let (ps, worker, _files) = pair(&[("STARWIRE_REACTORS", "2")]);
    let mut half_open: Vec<TcpStream> = Vec::new();
    let beginnings: [&[u8]; 4] = [b"", &[0x16], &[0x16, 3, 1, 2, 0], &[0x16, 3, 1, 64, 0, 1, 0, 63, 252, 3, 3]];
    eventually("making way", || {
        for beginning in beginnings.iter().cycle().take(100) {
            let mut raw = ps.connect();
            raw.write_all(beginning).unwrap();
            half_open.push(raw);
        }
        count(&ps.task, "starwire_unauthenticated_dropped_total") > 50
    });
    assert_eq!(call(&channel(&worker, &ps), ECHO, b"let me in", None).meta, b"let me in");
    let lines = ps.task.seen.lines.lock().unwrap().clone();
    assert_eq!(ps.task.logged("dropped a connection"), 1, "{lines:?}");
}

#[test]
fn hellos_get_a_part_of_the_time() {
    let (ps, worker, files) = pair(&[("STARWIRE_REACTORS", "2")]);
    let hello = hellos::hello(&files[1], &[b"starwire/2"]);
    let delayed = || count(&ps.task, "starwire_tls_handshakes_delayed_total");
    let mut half_open = std::collections::VecDeque::new();
    eventually("waiting", || {
        // Few at a time: where a handshake takes milliseconds, the next one waits for a second.
        for _ in 0..8 {
            let mut raw = ps.connect();
            raw.write_all(&hello).unwrap();
            half_open.push_back(raw);
        }
        half_open.drain(..half_open.len() - 8);
        delayed() > 0
    });
    // The last ones get their answers, and a member gets in after them.
    for raw in &mut half_open {
        assert!(matches!(raw.read(&mut [0; 64]), Ok(1..)));
    }
    assert_eq!(call(&channel(&worker, &ps), ECHO, b"let me in", None).meta, b"let me in");
}

#[test]
fn a_hello_of_any_length_is_bounded() {
    let (ps, _worker, _files) = pair(&[]);
    let mut raw = ps.connect();
    // A handshake message of 60,000 bytes, in records.
    let _ = raw.write_all(&[0x16, 3, 1, 0x40, 0, 1, 0, 0xea, 0x60]);
    for _ in 0..10 {
        let _ = raw.write_all(&[3; 16_380]).and_then(|()| raw.write_all(&[0x16, 3, 1, 0x40, 0]));
    }
    let _ = raw.read_to_end(&mut Vec::new());
    // It was cut off, not waited for.
    eventually("a line about it", || ps.task.logged("the TLS hello of the peer is not in one record") == 1);
}

/// Passes bytes on, and changes one of those to the client.
fn meddler(to: std::net::SocketAddr, at: usize) -> std::net::SocketAddr {
    relay(to, at).0
}

/// And what it has seen of the server.
fn relay(to: std::net::SocketAddr, at: usize) -> (std::net::SocketAddr, Arc<Mutex<Vec<u8>>>) {
    let all = Arc::new(Mutex::new(Vec::new()));
    let told = all.clone();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let server = TcpStream::connect(to).unwrap();
            let (mut from, mut into) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            std::thread::spawn(move || std::io::copy(&mut from, &mut into));
            let (mut from, mut into) = (server, client);
            let told = told.clone();
            std::thread::spawn(move || {
                let (mut seen, mut buffer) = (0, vec![0; 65_536]);
                while let Ok(n @ 1..) = from.read(&mut buffer) {
                    if (seen..seen + n).contains(&at) {
                        buffer[at - seen] ^= 1;
                    }
                    seen += n;
                    told.lock().unwrap().extend_from_slice(&buffer[..n]);
                    if into.write_all(&buffer[..n]).is_err() {
                        return;
                    }
                }
                let _ = into.shutdown(std::net::Shutdown::Both);
            });
        }
    });
    (address, all)
}

/// The bytes that it sees are not those of the reply, nor is the server's name among them.
#[test]
fn a_relay_reads_nothing() {
    if std::env::var_os("STARWIRE_TEST_TRANSPORT").is_some() {
        return;
    }
    let (ps, worker, _files) = pair(&[]);
    let (plain_ps, plain) = (Task::start(PS, &[TCP]), Task::start(WORKER, &[TCP]));
    let roads = [(ps.address, worker.task.engine()), (plain_ps.address().parse().unwrap(), plain.engine())];
    let found = roads.map(|(to, client)| {
        let (address, seen) = relay(to, usize::MAX);
        let channel = client.channel(PS, &address.to_string()).unwrap();
        // Inline bytes, and bulk bytes.
        let parts = vec![pattern(100, 1), pattern(1 << 20, 2)];
        let end = call(&channel, ECHO, b"", Some(payload(parts.clone(), &Arc::new(AtomicU64::new(0)))));
        assert!(end.code == 0 && end.parts == parts, "{end:?}");
        let seen = seen.lock().unwrap();
        assert!(seen.len() > 1 << 20);
        let sees = |words: &[u8]| seen.windows(words.len()).any(|window| window == words);
        [sees(&parts[0]), sees(&parts[1][..100]), sees(PS.as_bytes())]
    });
    // Without TLS it would see them.
    assert_eq!(found, [[false; 3], [true; 3]]);
}

#[test]
fn changed_bytes_end_the_connection() {
    if std::env::var_os("STARWIRE_TEST_TRANSPORT").is_some() {
        return;
    }
    let (ps, worker, _files) = pair(&[]);
    let released = Arc::new(AtomicU64::new(0));
    for at in [200, 20_000, 1 << 20] {
        let address = meddler(ps.address, at);
        let channel = worker.task.engine().channel(PS, &address.to_string()).unwrap();
        let parts = vec![pattern(3 << 20, 1)];
        let end = call(&channel, ECHO, b"", Some(payload(parts, &released)));
        assert!(matches!(end.code, 14 | 16), "{end:?}");
        assert!(end.parts.iter().all(|part| part != &pattern(3 << 20, 1)));
    }
}

#[test]
fn files_are_read_again_while_calls_go_on() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let both = format!("{}{}", old.pem(), new.pem());
    let ps_files = old.identity(PS_NAME);
    let files = old.identity(WORKER_NAME);
    let ps = start(PS, &ps_files, &[TCP, NAMES]);
    let (first, stop) = (start(WORKER, &files, &[TCP, NAMES]), Arc::new(AtomicBool::new(false)));
    let (open, stopped) = (channel(&first, &ps), stop.clone());
    let load = std::thread::spawn(move || {
        let released = Arc::new(AtomicU64::new(0));
        let mut calls = 0;
        while !stopped.load(Ordering::Relaxed) {
            let parts = vec![pattern(200_000, calls as u8)];
            let end = call(&open, ECHO, b"", Some(payload(parts.clone(), &released)));
            assert!(end.code == 0 && end.parts == parts, "{}", end.message);
            calls += 1;
        }
        calls
    });
    let comes_in = |words: &str| {
        let worker = start(WORKER, &files, &[TCP, NAMES]);
        let end = call(&channel(&worker, &ps), ECHO, b"hello", None);
        assert_eq!(end.message, words);
    };
    comes_in("");
    // Each step as an operator takes it: both CAs are trusted before the first certificate of the new one is used.
    let learns = |line: &str, times: usize| {
        eventually(line, || {
            comes_in("");
            ps.task.logged(line) >= times
        });
        assert_eq!(ps.task.logged(line), times);
    };
    let changed = "have changed; new connections use them";
    let own = |authority: &Authority, name| authority.issue(name, LONG);
    let (ps_old, worker_old) = (own(&old, PS_NAME), own(&old, WORKER_NAME));
    ps_files.replace(&ps_old.0, &ps_old.1, &both);
    files.replace(&worker_old.0, &worker_old.1, &both);
    learns(changed, 1);
    let (ps_new, worker_new) = (own(&new, PS_NAME), own(&new, WORKER_NAME));
    ps_files.replace(&ps_new.0, &ps_new.1, &both);
    learns(changed, 2);
    files.replace(&worker_new.0, &worker_new.1, &both);
    comes_in("");
    ps_files.replace(&ps_new.0, &ps_new.1, &new.pem());
    learns(changed, 3);
    // Broken files change nothing, and are reported once.
    ps_files.replace("not a certificate", &ps_new.1, &new.pem());
    let broken = "cert.pem cannot be used (it has no certificate in PEM format)";
    learns(broken, 1);
    // It looks again after a second, and says nothing about it.
    std::thread::sleep(Duration::from_millis(1100));
    comes_in("");
    assert_eq!(ps.task.logged(broken), 1);
    // So do those of another task, which every peer would refuse.
    let other = own(&new, "starwire://test/ps/1");
    ps_files.replace(&other.0, &other.1, &new.pem());
    learns("cert.pem cannot be used (its certificate names starwire://test/ps/1, so it", 1);
    comes_in("");
    // The old CA is trusted no more.
    files.replace(&worker_old.0, &worker_old.1, &both);
    let worker = start(WORKER, &files, &[TCP, NAMES]);
    let end = call(&channel(&worker, &ps), ECHO, b"", None);
    assert!(end.message.contains("not issued by a CA of the peer's STARWIRE_TLS_CA"), "{end:?}");
    stop.store(true, Ordering::Relaxed);
    assert!(load.join().unwrap() > 10);
}

#[test]
fn files_that_become_usable_by_themselves_are_used() {
    let authority = Authority::new("test");
    let (ps_files, files) = (authority.identity(PS_NAME), authority.identity(WORKER_NAME));
    let ps = start(PS, &ps_files, &[TCP, NAMES]);
    let logged = |line: &str| {
        // A new connection looks at the files.
        let worker = start(WORKER, &files, &[TCP, NAMES]);
        assert_eq!(call(&channel(&worker, &ps), ECHO, b"", None).message, "");
        ps.task.logged(line)
    };
    let (refused, changed) = ("cert.pem cannot be used", "have changed; new connections use them");
    // It is seen before it is valid, however slow the machine is.
    let times = (3..).find_map(|seconds| {
        let before = logged(changed);
        let from = SystemTime::now() + Duration::from_secs(seconds);
        let (certificate, key) = authority.issue_from(PS_NAME, from);
        ps_files.replace(&certificate, &key, &authority.pem());
        eventually("the files are seen", || logged(refused) > 0 || ps.task.logged(changed) > before);
        (ps.task.logged(refused) > 0).then_some(before)
    });
    eventually("the files are used", || logged(changed) > times.unwrap());
    assert_eq!(ps.task.logged(refused), 1, "it is said once");
}
