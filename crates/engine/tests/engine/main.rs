//! Engines in one process that talk over real sockets.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "a test may panic, and its numbers are small"
)]

mod admission;
mod harness;
mod joined;
mod metrics;
mod one_port;
mod resolver;
mod secret;
mod star;
mod tls;
mod tunnel;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use harness::*;
use starwire_engine::NewRecv;
use starwire_protocol::measure::{MEASURE, MOST_MEASURED, SAME_HOST};

const PS: &str = "/job:ps/replica:0/task:0";
const WORKER: &str = "/job:worker/replica:0/task:0";

/// Every kind of connection.
fn roads() -> Vec<Vec<(&'static str, &'static str)>> {
    let mut roads = Vec::new();
    for driver in ["epoll", "io_uring"] {
        for unix in ["auto", "off"] {
            roads.push(vec![("STARWIRE_DRIVER", driver), ("STARWIRE_UNIX", unix)]);
        }
    }
    // Busy polling, pinned to the CPUs that this process may use.
    roads.push(vec![
        ("WORKER_ENABLE_POLLING", "true"),
        ("PS_ENABLE_POLLING", "true"),
        ("WORKER_DISABLE_PIN_CORES", "false"),
        ("PS_DISABLE_PIN_CORES", "false"),
    ]);
    roads
}

fn pair(env: &[(&str, &str)]) -> (Task, Task) {
    let ps = Task::start(PS, env);
    let worker = Task::start(WORKER, env);
    worker.knows(PS, &ps);
    (ps, worker)
}

fn pattern(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

#[test]
fn a_payload_above_the_limit_is_refused() {
    let (ps, worker) = (Task::start(PS, &[("STARWIRE_MAX_CALL_BYTES", "1M")]), Task::start(WORKER, &[]));
    worker.knows(PS, &ps);
    let (channel, released) = (worker.channel(PS), Arc::new(AtomicU64::new(0)));
    let echo = |bytes| call(&channel, ECHO, b"", Some(payload(vec![pattern(bytes, 1)], &released)));
    assert_eq!(echo(1 << 20).parts, [pattern(1 << 20, 1)]);
    let end = echo((1 << 20) + 1);
    assert_eq!(end.code, starwire_protocol::code::RESOURCE_EXHAUSTED);
    assert!(end.message.contains("a payload of 1048577 bytes exceeds the peer's limit of 1048576"), "{}", end.message);
}

#[test]
fn calls_survive_a_round_trip() {
    for env in roads() {
        let (ps, worker) = pair(&env);
        let channel = worker.channel(PS);
        let released = Arc::new(AtomicU64::new(0));
        let sizes = [0, 1, 7, 8, 63, 4096, 8191, 8192, 8193, 100_000, 1 << 20, 10 << 20];
        for (i, size) in sizes.iter().enumerate() {
            let bytes = pattern(*size, i as u8);
            let end = call(&channel, ECHO, b"hello", Some(payload(vec![bytes.clone()], &released)));
            assert_eq!((end.code, &end.meta[..]), (0, &b"hello"[..]), "{size}: {}", end.message);
            assert!(end.parts == vec![bytes], "{size} bytes are the same in {env:?}");
        }
        let many: Vec<Vec<u8>> = (0..300).map(|i| pattern(i * 97, i as u8)).collect();
        let end = call(&channel, ECHO, b"", Some(payload(many.clone(), &released)));
        assert!(end.parts == many, "many parts in {env:?}");
        let end = call(&channel, ECHO, b"no payload", None);
        assert_eq!((end.meta, end.parts.len(), end.from_peer), (b"no payload".to_vec(), 0, true));
        eventually("release", || released.load(Ordering::Relaxed) == sizes.len() as u64 + 1);
        eventually("release at the ps", || ps.seen.released.load(Ordering::Relaxed) == sizes.len() as u64 + 1);
    }
}

#[test]
fn tasks_of_one_host_talk_over_a_unix_socket() {
    // The listener, and the connection accepted through it.
    for (unix, expected) in [("auto", 2), ("off", 0)] {
        let (ps, worker) = pair(&[("STARWIRE_UNIX", unix)]);
        assert_eq!(call(&worker.channel(PS), ECHO, b"", None).code, 0);
        assert_eq!(unix_sockets(&ps), expected);
    }
}

#[test]
fn tasks_of_one_host_copy_large_payloads_once() {
    for (unix, expected) in [("auto", true), ("socket", false)] {
        for driver in ["epoll", "io_uring"] {
            let road = [("STARWIRE_UNIX", unix), ("STARWIRE_DRIVER", driver)];
            let (ps, worker) = pair(&road);
            let (channel, released) = (worker.channel(PS), Arc::new(AtomicU64::new(0)));
            let parts = || vec![pattern(3, 1), pattern(300_000, 2), pattern(9 << 20, 3), Vec::new(), pattern(8192, 4)];
            for _ in 0..8 {
                let end = call(&channel, ECHO, b"", Some(payload(parts(), &released)));
                assert!(end.code == 0 && end.parts == parts(), "{}", end.message);
            }
            eventually("release", || released.load(Ordering::Relaxed) == 8);
            eventually("release at the ps", || ps.seen.released.load(Ordering::Relaxed) == 8);
            // The first payloads may be sent before the peer has announced that it can read.
            let all = 6 * (9 << 20);
            for task in [&ps, &worker] {
                let (lent, borrowed) =
                    (count(task, "starwire_lent_bytes_total"), count(task, "starwire_borrowed_bytes_total"));
                assert_eq!((lent > all, borrowed > all), (expected, expected), "{lent} {borrowed} {road:?}");
                assert_eq!(count(task, "starwire_bytes_sent_total") < all, expected);
            }
        }
    }
}

#[test]
fn the_path_to_a_task_can_be_measured() {
    for (unix, same_host) in [("socket", SAME_HOST), ("off", 0)] {
        // The witness of lending must not be what tells the hosts apart.
        let (_ps, worker) = pair(&[("STARWIRE_UNIX", unix)]);
        let channel = worker.channel(PS);
        for bytes in [0, 1, 100_000, MOST_MEASURED] {
            let end = call(&channel, MEASURE, &u32::try_from(bytes).unwrap().to_le_bytes(), None);
            assert_eq!((end.code, &end.meta[..]), (0, &[same_host][..]), "{unix}: {}", end.message);
            let parts = if bytes == 0 { vec![] } else { vec![vec![0; bytes]] };
            assert!(end.parts == parts, "{bytes} bytes over {unix}");
        }
        for meta in [&u32::try_from(MOST_MEASURED + 1).unwrap().to_le_bytes()[..], b"", b"12345"] {
            let end = call(&channel, MEASURE, meta, None);
            assert_eq!(end.code, 3, "{}", end.message);
            assert!(end.message.contains("malformed measurement"), "{}", end.message);
        }
    }
}

#[test]
fn errors_carry_code_message_and_details() {
    let (_ps, worker) = pair(&[]);
    let end = call(&worker.channel(PS), FAIL, b"", None);
    assert_eq!((end.code, end.message.as_str(), &end.meta[..]), (5, "no such thing", &b"details"[..]));
    let end = call(&worker.channel(PS), 77, b"", None);
    assert_eq!((end.code, end.message.as_str()), (12, "method 77"));
    let end = call(&worker.channel(PS), 0, b"", None);
    assert_eq!(end.code, 3, "{}", end.message);
}

#[test]
fn thousands_of_rendezvous_requests() {
    for env in roads() {
        let (ps, worker) = pair(&env);
        let channel = worker.channel(PS);
        for step in 1..4 {
            let waiters: Vec<_> = (0..1000)
                .map(|i| {
                    let size = [0, 4, 4096, 8192, 20_000][i % 5];
                    (i, size, recv(&channel, step, &format!("key;{i};{size}"), (i % 3) as u64, (i % 2) as u64).1)
                })
                .collect();
            for (i, size, waiter) in waiters {
                let end = waiter.wait();
                assert_eq!(end.code, 0, "{}", end.message);
                let fill = step as u8 ^ (i % 3) as u8 ^ (i % 2) as u8;
                assert!(end.parts == vec![vec![fill; size]], "tensor {i} of step {step} in {env:?}");
            }
        }
        assert_eq!(ps.seen.keys_alive.load(Ordering::Relaxed), 1000, "each key is defined once");
        drop(worker);
        eventually("keys go with the connection", || ps.seen.keys_alive.load(Ordering::Relaxed) == 0);
    }
}

#[test]
fn a_malformed_key_is_refused_and_nothing_else() {
    let (_ps, worker) = pair(&[]);
    let channel = worker.channel(PS);
    let end = recv(&channel, 1, "bad key", 0, 0).1.wait();
    assert_eq!(end.code, 3, "{}", end.message);
    assert_eq!(recv(&channel, 1, "key;8", 0, 0).1.wait().code, 0);
}

#[test]
fn cancelled_calls_end_at_once_and_at_the_peer() {
    let (ps, worker) = pair(&[]);
    let channel = worker.channel(PS);
    let (id, waiter) = call_with(&channel, NEVER, b"", None, &Options::default());
    eventually("arrival", || ps.seen.never.lock().unwrap().len() == 1);
    channel.cancel(id, 1, "not wanted".into());
    let end = waiter.wait();
    assert_eq!((end.code, end.message.as_str(), end.from_peer), (1, "not wanted", false));
    eventually("on_cancel", || ps.seen.cancels.lock().unwrap().contains(&(NEVER, 0, false)));
    let (id, waiter) = recv(&channel, 42, "never;0", 0, 0);
    eventually("arrival", || ps.seen.never.lock().unwrap().len() == 2);
    channel.cancel(id, 10, "aborted".into());
    assert_eq!(waiter.wait().code, 10);
    eventually("on_cancel", || ps.seen.cancels.lock().unwrap().contains(&(0, 42, false)));
    channel.cancel(999_999, 1, "unknown".into());
    assert_eq!(call(&channel, ECHO, b"still there", None).code, 0);
}

#[test]
fn a_cancellation_by_a_callback_does_not_overtake_another_threads_request() {
    let (ps, worker) = pair(&[("STARWIRE_REACTORS", "1")]);
    let channel = worker.channel(PS);
    let (waiter, op) = op(false);
    let (asked, ask) = std::sync::mpsc::channel();
    let again = channel.clone();
    waiter.then(move || {
        let other = again.clone();
        let request = move || recv(&other, 2, "never;0", 0, 0);
        let (id, late) = std::thread::spawn(request).join().unwrap();
        again.cancel(id, 1, "not wanted".into());
        asked.send(late).unwrap();
    });
    channel.recv(NewRecv { step: 1, prefix: b"key;8"[..].into(), frame: 0, iter: 0, op });
    let end = ask.recv().unwrap().wait();
    assert!(end.code == 1 && end.message == "not wanted", "{end:?}");
    assert_eq!(waiter.wait().code, 0);
    drop(ps);
}

#[test]
fn a_callback_may_use_a_channel_that_another_thread_has_just_opened() {
    let (ps, worker) = pair(&[("STARWIRE_REACTORS", "1")]);
    let worker = Arc::new(worker);
    const SAME: &str = "/job:ps/replica:0/task:1";
    worker.knows(SAME, &ps);
    let (waiter, op) = op(false);
    let (asked, ask) = std::sync::mpsc::channel();
    let opener = worker.clone();
    waiter.then(move || {
        let channel = std::thread::spawn(move || opener.channel(SAME)).join().unwrap();
        // Its cancellation is in the mailbox, as the channel.
        let (id, cancelled) = call_with(&channel, NEVER, b"", None, &Options::default());
        channel.cancel(id, 1, "enough".into());
        asked.send([recv(&channel, 2, "key;8", 0, 0).1, cancelled]).unwrap();
    });
    worker.channel(PS).recv(NewRecv { step: 1, prefix: b"key;8"[..].into(), frame: 0, iter: 0, op });
    let ends = ask.recv().unwrap().map(|waiter| waiter.wait());
    assert_eq!(ends.each_ref().map(|end| end.code), [0, 1], "{ends:?}");
}

#[test]
fn a_large_reply_that_is_cancelled_midway_does_not_disturb_others() {
    for env in roads() {
        let (_ps, worker) = pair(&env);
        let channel = worker.channel(PS);
        for round in 0..20 {
            let (id, big) = call_with(&channel, SEND_MUCH, b"30000000", None, &Options::default());
            std::thread::sleep(Duration::from_micros(300 * round));
            channel.cancel(id, 1, "enough".into());
            let end = big.wait();
            assert!(end.code == 1 || end.parts == vec![vec![7; 30_000_000]], "{}", end.message);
            let bytes = pattern(50_000, round as u8);
            let released = Arc::default();
            let end = call(&channel, ECHO, b"", Some(payload(vec![bytes.clone()], &released)));
            assert!(end.parts == vec![bytes], "round {round} in {env:?}: {}", end.message);
        }
    }
}

#[test]
fn deadlines_are_kept() {
    let (_ps, worker) = pair(&[]);
    let channel = worker.channel(PS);
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    let start = Instant::now();
    let options = Options { deadline_ms: 150, ..Options::default() };
    let end = call_with(&channel, NEVER, b"", None, &options).1.wait();
    assert_eq!(end.code, 4, "{}", end.message);
    let took = start.elapsed();
    assert!(took >= Duration::from_millis(145), "{took:?}");
}

#[test]
fn a_reply_that_its_receiver_refuses_is_read_and_dropped() {
    let (_ps, worker) = pair(&[]);
    let channel = worker.channel(PS);
    let options = Options { refuse: true, ..Options::default() };
    let end = call_with(&channel, SEND_MUCH, b"5000000", None, &options).1.wait();
    assert_eq!(end.code, 8, "{}", end.message);
    assert_eq!(call(&channel, ECHO, b"x", None).meta, b"x");
}

#[test]
fn an_absent_peer_fails_calls() {
    let mut ps = Task::start(PS, &[]);
    let worker = Task::start(WORKER, &[]);
    worker.knows(PS, &ps);
    ps.stop();
    let end = call(&worker.channel(PS), ECHO, b"", None);
    assert_eq!(end.code, 14, "{}", end.message);
    assert!(end.message.contains(PS) && end.message.contains("refused"), "{}", end.message);
}

#[test]
fn patient_calls_wait_for_a_late_peer() {
    let worker = Task::start(WORKER, &[]);
    let address = format!("127.0.0.1:{}", free_port());
    worker.finds(PS, address.clone());
    let channel = worker.channel(PS);
    let patient = Options { wait_for_ready: true, deadline_ms: 15_000, ..Options::default() };
    let (_, waiter) = call_with(&channel, ECHO, b"at last", None, &patient);
    let brief = Options { wait_for_ready: true, deadline_ms: 200, ..Options::default() };
    let end = call_with(&channel, ECHO, b"", None, &brief).1.wait();
    assert_eq!(end.code, 4, "{}", end.message);
    assert!(end.message.contains(PS), "{}", end.message);
    assert!(!waiter.is_done());
    let _ps = Task::start_at(PS, 1, &[], &address);
    assert_eq!(waiter.wait().meta, b"at last");
}

#[test]
fn death_ends_requests_in_flight_and_the_next_incarnation_is_found() {
    for env in roads() {
        let (mut ps, worker) = pair(&env);
        let channel = worker.channel(PS);
        let waiters: Vec<_> = (0..50).map(|i| recv(&channel, i, "never;0", 0, 0).1).collect();
        eventually("arrival", || ps.seen.never.lock().unwrap().len() == 50);
        let address = ps.address();
        ps.stop();
        for waiter in waiters {
            let end = waiter.wait();
            assert!(end.code == 14 && end.message.contains(PS), "{}", end.message);
        }
        let _again = Task::start_at(PS, 2, &env, &address);
        let end = call_with(&channel, ECHO, b"back", None, &Options { wait_for_ready: true, ..Options::default() });
        assert_eq!(end.1.wait().meta, b"back");
        eventually("a line about it", || worker.logged("was restarted") == 1);
    }
}

#[test]
fn stopping_ends_every_call_and_tells_the_server_side() {
    let (ps, mut worker) = pair(&[]);
    let channel = worker.channel(PS);
    let waiters: Vec<_> = (0..10).map(|_| call_with(&channel, NEVER, b"", None, &Options::default()).1).collect();
    let lost = call_with(
        &worker.channel("/job:ps/replica:0/task:9"),
        ECHO,
        b"",
        None,
        &Options { wait_for_ready: true, ..Options::default() },
    );
    eventually("arrival", || ps.seen.never.lock().unwrap().len() == 10);
    worker.stop();
    for waiter in waiters {
        assert_eq!(waiter.wait().code, 14);
    }
    assert_eq!(lost.1.wait().code, 14);
    eventually("peer_gone", || {
        ps.seen.cancels.lock().unwrap().iter().filter(|c| **c == (NEVER, 0, true)).count() == 10
    });
    let end = call(&channel, ECHO, b"", None);
    assert!(end.code == 14 && end.message.contains("stopped"), "{}", end.message);
    let ticket = ps.seen.never.lock().unwrap()[0];
    ps.engine().reply(ticket, 0, b"too late", None);
}

#[test]
fn the_wrong_protocol_and_the_wrong_secret_are_named() {
    let secret = ("STARWIRE_SECRET", "a-secret-of-enough-length");
    let other = ("STARWIRE_SECRET", "another-secret-of-enough-length");
    let worker = Task::start(WORKER, &[secret]);
    let star = Task::try_start("/job:ps/replica:0/task:2", "star_server", 1, &[secret]).unwrap();
    worker.knows("/job:ps/replica:0/task:2", &star);
    let end = call(&worker.channel("/job:ps/replica:0/task:2"), ECHO, b"", None);
    assert!(end.code == 9 && end.message.contains("star_server") && end.message.contains("grpc++"), "{end:?}");
    for (number, env) in [vec![other], vec![]].into_iter().enumerate() {
        let name = format!("/job:ps/replica:0/task:{}", 3 + number);
        let raw = Task::start(&name, &env);
        worker.knows(&name, &raw);
        let end = call(&worker.channel(&name), ECHO, b"", None);
        assert!(end.code == 16 && end.message.to_lowercase().contains("secret"), "{end:?}");
    }
    let good = Task::start("/job:ps/replica:0/task:5", &[secret]);
    worker.knows("/job:ps/replica:0/task:5", &good);
    assert_eq!(call(&worker.channel("/job:ps/replica:0/task:5"), ECHO, b"ok", None).meta, b"ok");
}

#[test]
fn garbage_is_dropped_and_logged_once_while_others_go_on() {
    let (ps, worker) = pair(&[("STARWIRE_UNIX", "off")]);
    let channel = worker.channel(PS);
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    let mut header = b"SWB1\x03\0\0\0".to_vec();
    header.extend_from_slice(&[0xFF; 24]);
    for garbage in [&b"\x16\x03\x01hello"[..], &[0u8; 5000], &header, b"SWB1\x09", &[0xA5; 100_000]] {
        for _ in 0..5 {
            let mut socket = TcpStream::connect(ps.address()).unwrap();
            socket.set_read_timeout(Some(PATIENCE)).unwrap();
            let _ = socket.write_all(garbage);
            let _ = socket.shutdown(std::net::Shutdown::Write);
            let mut rest = Vec::new();
            // Dropped: end of stream or reset, not a hang.
            if let Err(error) = socket.read_to_end(&mut rest) {
                assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "still open after {garbage:?}");
            }
            assert_eq!(call(&channel, ECHO, b"fine", None).meta, b"fine");
        }
    }
    assert_eq!(ps.logged("dropped a connection"), 1, "{:?}", ps.seen.lines.lock().unwrap());
}

/// The start of a block in another version of the wire format, with `then` bytes that such a peer might send after it.
fn of_another_version(then: usize) -> Vec<u8> {
    let mut bytes = b"SWB1\x09".to_vec();
    bytes.resize(32 + then, 0);
    bytes
}

/// What such a peer hears, how its connection ends, and how long that takes.
fn sends_another_version(task: &Task, then: usize) -> (String, std::io::Result<usize>, Duration) {
    let begun = Instant::now();
    let mut peer = TcpStream::connect(task.address()).unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    peer.set_write_timeout(Some(PATIENCE)).unwrap();
    let sent = peer.write_all(&of_another_version(then));
    // The reason must still be there when a reset would have come, so this waits for what must not happen.
    std::thread::sleep(Duration::from_millis(50));
    let mut heard = Vec::new();
    let ended = sent.and_then(|()| peer.read_to_end(&mut heard));
    (String::from_utf8_lossy(&heard).into_owned(), ended, begun.elapsed())
}

#[test]
fn a_peer_that_breaks_the_protocol_is_told_why() {
    for driver in ["epoll", "io_uring"] {
        let Ok(task) = Task::try_start("/job:ps/replica:0/task:0", "grpc++", 1, &[("STARWIRE_DRIVER", driver)]) else {
            continue; // no io_uring on this machine
        };
        for then in [0, 100, 8 << 20] {
            let (heard, ended, took) = sends_another_version(&task, then);
            // The server takes what comes for a second only: if one side stood still for longer, there may be a reset.
            if took < Duration::from_secs(1) {
                assert!(ended.is_ok(), "{driver}, {then}: {ended:?}, {heard:?}");
            }
            if ended.is_ok() {
                let reason = "has version 9 of the starwire protocol, this side speaks version 3";
                assert!(heard.contains(reason), "{driver}, {then}: {heard:?}");
            }
        }
    }
}

#[test]
fn a_peer_that_never_stops_sending_is_cut_off() {
    let task = Task::start("/job:ps/replica:0/task:0", &[]);
    let mut peer = TcpStream::connect(task.address()).unwrap();
    peer.set_write_timeout(Some(PATIENCE)).unwrap();
    let begin = Instant::now();
    peer.write_all(&of_another_version(0)).unwrap();
    let noise = vec![0; 64 << 10];
    while peer.write_all(&noise).is_ok() {
        assert!(begin.elapsed() < PATIENCE, "the connection stays open");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut silent = TcpStream::connect(task.address()).unwrap();
    silent.set_read_timeout(Some(PATIENCE)).unwrap();
    silent.write_all(&of_another_version(0)).unwrap();
    // It keeps its side open, but the server waits only a moment.
    let mut heard = Vec::new();
    silent.read_to_end(&mut heard).unwrap();
    eventually("everybody is gone", || silent.write_all(b"still there?").is_err());
}

#[test]
fn engines_can_be_made_again_and_again() {
    for _ in 0..10 {
        let (_ps, worker) = pair(&[]);
        assert_eq!(call(&worker.channel(PS), ECHO, b"x", None).meta, b"x");
    }
    eventually("no thread is left", || {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let names = threads.filter_map(|t| std::fs::read_to_string(t.ok()?.path().join("comm")).ok());
        // Other tests of this process run engines at the same time: two each.
        names.filter(|n| n.starts_with("starwire-")).count() <= 80
    });
}

#[test]
fn calls_from_many_threads() {
    let (_ps, worker) = pair(&[]);
    let channel = worker.channel(PS);
    std::thread::scope(|scope| {
        for thread in 0..8u8 {
            let channel = &channel;
            scope.spawn(move || {
                let released = Arc::default();
                for i in 0..200u32 {
                    let bytes = pattern((i as usize * 131) % 30_000, thread);
                    let end = call(channel, ECHO, &i.to_le_bytes(), Some(payload(vec![bytes.clone()], &released)));
                    assert_eq!(end.meta, i.to_le_bytes());
                    assert!(end.parts == vec![bytes]);
                }
            });
        }
    });
}

/// The value of one of a task's metrics.
fn count(task: &Task, name: &str) -> u64 {
    let text = task.engine().metrics_text();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

fn http(task: &Task, request: &str) -> String {
    let mut socket = TcpStream::connect(task.address()).unwrap();
    socket.set_read_timeout(Some(PATIENCE)).unwrap();
    socket.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    socket.read_to_string(&mut answer).unwrap();
    answer
}

#[test]
fn metrics_and_health_are_served_on_the_data_port() {
    let (ps, worker) = pair(&[]);
    let released = Arc::default();
    let channel = worker.channel(PS);
    assert_eq!(call(&channel, ECHO, b"", Some(payload(vec![vec![1; 100_000], vec![2; 100]], &released))).code, 0);
    let get = |what: &str| http(&ps, &format!("GET {what} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"));
    assert!(get("/healthz").starts_with("HTTP/1.1 200"), "{}", get("/healthz"));
    let text = get("/metrics");
    let value = |name: &str| -> u64 {
        let line = text
            .lines()
            .find(|l| l.starts_with(name) && !l.starts_with('#'))
            .unwrap_or_else(|| panic!("{name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    };
    assert_eq!(value("starwire_calls_received_total"), 1);
    assert_eq!(value("starwire_payload_bytes_received_total"), 100_100);
    assert_eq!(value("starwire_copied_bytes_received_total"), 100, "only the small part is copied");
    assert_eq!(value("starwire_connections_in"), 1);
    assert_eq!(call(&channel, ECHO, b"still", None).meta, b"still");
}
