//! Unauthenticated connections must not disturb a server and its members: raw bytes over real sockets, as in
//! `docs/protocol.md`.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::harness::*;
use crate::{PS, WORKER, count, http, pair, pattern, roads};
use starwire_engine::NewRecv;
use starwire_net::transport::descriptors;

const SECRET: (&str, &str) = ("STARWIRE_SECRET", "a-secret-of-enough-length");
const TCP: (&str, &str) = ("STARWIRE_UNIX", "off");
/// The unauthenticated connections in this file are TCP.
pub const ANY_WAY: (&str, &str) = ("STARWIRE_VERBS_FALLBACK", "true");

const HELLO: u8 = 1;
pub const WELCOME: u8 = 2;
const CHALLENGE: u8 = 3;
const REFUSE: u8 = 4;
pub const CALL: u8 = 12;
pub const REPLY: u8 = 13;
pub const PING: u8 = 20;
const DATA: u8 = 14;
pub const CANCEL: u8 = 15;
const LEND: u8 = 16;

pub fn frame(kind: u8, code: u16, id: u64, fixed: &[u64], meta: &[u8]) -> Vec<u8> {
    let mut out = vec![kind, 0];
    out.extend(code.to_le_bytes());
    out.extend(u32::try_from(meta.len()).unwrap().to_le_bytes());
    out.extend(id.to_le_bytes());
    out.extend(fixed.iter().flat_map(|word| word.to_le_bytes()));
    out.extend(meta);
    out.resize(out.len().div_ceil(8) * 8, 0);
    out
}

pub fn block(sequence: u64, control: &[u8]) -> Vec<u8> {
    let mut out = b"SWB1\x03\0\0\0".to_vec();
    out.extend(u32::try_from(control.len()).unwrap().to_le_bytes());
    out.extend([0; 12]);
    out.extend(sequence.to_le_bytes());
    out.extend(control);
    let sum = crc32c::crc32c(&out);
    out[12..16].copy_from_slice(&sum.to_le_bytes());
    out
}

fn hello(features: u64, more: &[(u16, &[u8])]) -> Vec<u8> {
    hello_of("grpc++", features, more)
}

pub fn hello_of(protocol: &str, features: u64, more: &[(u16, &[u8])]) -> Vec<u8> {
    hello_as("/job:worker/replica:0/task:9", protocol, features, more)
}

pub fn hello_as(task: &str, protocol: &str, features: u64, more: &[(u16, &[u8])]) -> Vec<u8> {
    let mut limits = Vec::new();
    limits.extend([1000u32, 1000].iter().flat_map(|n| n.to_le_bytes()));
    limits.extend((1u64 << 30).to_le_bytes());
    limits.extend([1000u32, 1 << 20].iter().flat_map(|n| n.to_le_bytes()));
    limits.extend((1u64 << 32).to_le_bytes());
    let incarnation = 77u64.to_le_bytes();
    let mut all: Vec<(u16, &[u8])> =
        vec![(1, protocol.as_bytes()), (2, task.as_bytes()), (3, &incarnation), (9, &limits)];
    all.extend_from_slice(more);
    let mut fields = Vec::new();
    for (tag, value) in all {
        fields.extend(tag.to_le_bytes());
        fields.extend(u16::try_from(value.len()).unwrap().to_le_bytes());
        fields.extend(value);
    }
    block(0, &frame(HELLO, 0, features, &[], &fields))
}

/// Reads the control section of the next block.
pub fn heard(stream: &mut impl Read) -> std::io::Result<Vec<u8>> {
    let mut header = [0; 32];
    stream.read_exact(&mut header)?;
    let mut control = vec![0; u32::from_le_bytes(header[8..12].try_into().unwrap()) as usize];
    stream.read_exact(&mut control)?;
    Ok(control)
}

pub fn meta(frame: &[u8]) -> &[u8] {
    &frame[16..16 + u32::from_le_bytes(frame[4..8].try_into().unwrap()) as usize]
}

pub fn connect(task: &Task) -> TcpStream {
    let stream = TcpStream::connect(task.address()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Raises the limit of descriptors: this process has both ends of the connections.
fn allow_descriptors() {
    descriptors::allow(16_000).unwrap();
}

/// Opens half-open connections until `lost` of them were dropped. The server may be slower than this thread.
fn open_half_open(task: &Task, lost: u64, half_open: &mut Vec<TcpStream>, come: impl Fn(&Task) -> TcpStream) {
    eventually("making way", || {
        if half_open.len() < 6000 {
            half_open.extend((0..100).map(|_| come(task)));
        }
        count(task, "starwire_unauthenticated_dropped_total") >= lost
    });
}

#[test]
fn unauthenticated_connections_are_evicted_for_members() {
    allow_descriptors();
    for (secret, word) in [(Some(SECRET), &b""[..]), (None, b""), (None, b"SWB1\x03"), (Some(SECRET), b"challenge")] {
        let env: Vec<_> =
            [Some(TCP), Some(ANY_WAY), Some(("STARWIRE_REACTORS", "2")), secret].into_iter().flatten().collect();
        let begin = Instant::now();
        let ps = Task::start(PS, &env);
        // More half-open connections than there is room for.
        let mut half_open = Vec::new();
        let say = |ps: &Task| {
            let mut raw = connect(ps);
            match word {
                b"challenge" => raw.write_all(&block(0, &frame(CHALLENGE, 0, 0, &[], &[7; 32]))).unwrap(),
                word => raw.write_all(word).unwrap(),
            }
            raw
        };
        open_half_open(&ps, 100, &mut half_open, say);
        // The others lack time, on a slow machine: those that took ten seconds for a handshake are told nothing.
        let all_were_evicted = begin.elapsed() < Duration::from_secs(10);
        for number in 0..6 {
            half_open.extend((0..20).map(|_| say(&ps)));
            let worker = Task::start(&format!("/job:worker/replica:0/task:{number}"), &env);
            worker.knows(PS, &ps);
            let end = call(&worker.channel(PS), ECHO, b"let me in", None);
            assert_eq!(end.meta, b"let me in", "peer {number} was turned away: {}", end.message);
        }
        // One line for each minute; a slow machine needs more than one.
        let lines = ps.logged("dropped a connection");
        let minutes = usize::try_from(begin.elapsed().as_secs() / 60).unwrap();
        assert!((1..=1 + minutes).contains(&lines), "{:?}", ps.seen.lines.lock().unwrap());
        // The oldest were told the reason.
        let refused = |raw: &mut TcpStream| std::iter::from_fn(|| heard(raw).ok()).find(|control| control[0] == REFUSE);
        let Some(refusal) = half_open[..100].iter_mut().find_map(refused) else {
            assert!(!all_were_evicted, "nobody was told a reason");
            continue;
        };
        let reason = String::from_utf8_lossy(meta(&refusal)).into_owned();
        assert_eq!(refusal[2], 14);
        assert_eq!(reason.contains(PS), secret.is_none(), "{reason}");
        assert!(reason.contains("too many connections"), "{reason}");
    }
}

#[test]
fn a_member_is_never_evicted() {
    allow_descriptors();
    let env = [TCP, ("STARWIRE_REACTORS", "1")];
    let (ps, worker) = pair(&env);
    let channel = worker.channel(PS);
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    let mut half_open = Vec::new();
    open_half_open(&ps, 10, &mut half_open, connect);
    assert_eq!(call(&channel, ECHO, b"still here", None).meta, b"still here");
    assert_eq!(count(&worker, "starwire_connects_total"), 1, "over the same connection");
    drop(half_open);
    eventually("their places are free again", || {
        let mut late: Vec<_> = (0..50).map(|_| connect(&ps)).collect();
        let before = count(&ps, "starwire_unauthenticated_dropped_total");
        late.extend((0..50).map(|_| connect(&ps)));
        assert_eq!(call(&channel, ECHO, b"", None).code, 0);
        count(&ps, "starwire_unauthenticated_dropped_total") == before
    });
}

#[test]
fn an_unauthenticated_peer_learns_nothing_of_host_and_process() {
    let ps = Task::start(PS, &[ANY_WAY]);
    let mut raw = connect(&ps);
    raw.write_all(&hello(0, &[])).unwrap();
    let welcome = heard(&mut raw).unwrap();
    assert_eq!(welcome[0], WELCOME);
    let mut fields = meta(&welcome);
    let mut tags = Vec::new();
    while let [a, b, c, d, rest @ ..] = fields {
        tags.push(u16::from_le_bytes([*a, *b]));
        fields = &rest[usize::from(u16::from_le_bytes([*c, *d]))..];
    }
    assert!(tags.contains(&2) && !tags.contains(&7) && !tags.contains(&8), "{tags:?}");
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    assert!(!String::from_utf8_lossy(&welcome).contains(boot.trim()));
}

fn number(engine: &Engine, name: &str) -> u64 {
    let text = engine.metrics_text();
    let line = text.lines().find(|line| line.starts_with(name)).unwrap_or_else(|| panic!("{name} in {text}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

/// Makes a call that has no reply, and closes nothing when it hears GOODBYE.
fn silent_caller(number: u32, to: &Task) -> TcpStream {
    let mut silent = connect(to);
    let name = format!("/job:worker/replica:0/task:{number}");
    silent.write_all(&hello_as(&name, "grpc++", 0, &[])).unwrap();
    assert_eq!(heard(&mut silent).unwrap()[0], WELCOME);
    silent.write_all(&block(1, &frame(CALL, NEVER, 1, &[0], &[]))).unwrap();
    silent
}

/// Stops one side of a pair while a request waits. Peers that take GOODBYE and close nothing show how long a timeout
/// takes: all connections begin to end at once, and that of the pair must not be one of those that wait for it.
fn orderly_stop(env: &[(&str, &str)], worker_first: bool) {
    const STEP: i64 = 42;
    const SILENT: u32 = 8;
    let one_thread = [env, &[("STARWIRE_REACTORS", "1")]].concat();
    let open = [&one_thread[..], &[ANY_WAY]].concat();
    let (ps_env, worker_env) = if worker_first { (&one_thread, &open) } else { (&open, &one_thread) };
    let (mut ps, mut worker) = (Task::start(PS, ps_env), Task::start(WORKER, worker_env));
    worker.knows(PS, &ps);
    let stopping = if worker_first { &worker } else { &ps };
    // They come first, and so do their timeouts.
    let silent: Vec<_> = (1..=SILENT).map(|number| silent_caller(number, stopping)).collect();
    eventually("arrival", || stopping.seen.never.lock().unwrap().len() == silent.len());
    let channel = worker.channel(PS);
    assert_eq!(call(&channel, ECHO, b"", None).code, 0);
    let before = ps.seen.never.lock().unwrap().len();
    let (_, waiter) = recv(&channel, STEP, "never;0", 0, 0);
    eventually("arrival", || ps.seen.never.lock().unwrap().len() == before + 1);
    let engines = [ps.engine().clone(), worker.engine().clone()];
    if worker_first {
        worker.stop();
        eventually("the peer is gone", || number(&engines[0], "starwire_connections_in") == 0);
        let end = waiter.wait();
        assert!(end.code == 14 && end.message.contains("the server was stopped"), "{end:?}");
        let cut_off = worker.seen.cut_off.lock().unwrap();
        assert!(cut_off.iter().all(|(_, turn)| *turn > waiter.turn()), "{cut_off:?}, then {}", waiter.turn());
    } else {
        ps.stop();
        eventually("the peer is gone", || number(&engines[1], "starwire_connections_out") == 0);
        let end = waiter.wait();
        assert!(end.code == 14 && end.message.contains(PS), "{end:?}");
        assert!(end.message.contains("the server was stopped"), "{end:?}");
        let cut_off = ps.seen.cut_off.lock().unwrap();
        assert_eq!(cut_off.first().map(|(tag, _)| *tag), Some(STEP), "{cut_off:?}");
    }
    for engine in &engines {
        assert_eq!(number(engine, "starwire_losses_total"), 0, "{env:?}");
    }
}

#[test]
fn an_orderly_stop_is_no_loss() {
    for env in roads() {
        for worker_first in [false, true] {
            orderly_stop(&env, worker_first);
        }
    }
}

/// Run in its own process by `a_process_that_exits_is_no_loss`: connects to a server, makes a call and exits.
#[test]
#[ignore = "a part of another test"]
#[expect(clippy::exit, reason = "ends without an orderly shutdown")]
fn visitor() {
    let Ok(address) = std::env::var("STARWIRE_TEST_VISIT") else { return };
    let worker = Task::start("/job:worker/replica:0/task:0", &[]);
    worker.finds(PS, address);
    assert_eq!(call(&worker.channel(PS), ECHO, b"hello", None).meta, b"hello");
    std::process::exit(0);
}

/// Run in its own process by `a_process_that_exits_says_goodbye_when_no_reactor_makes_callbacks`: exits while one of
/// two reactors is in a callback, which ends when the test ends the input.
#[test]
#[ignore = "a part of another test"]
#[expect(clippy::exit, clippy::print_stderr, reason = "ends without an orderly shutdown, and says so to its test")]
fn visitor_in_a_callback() {
    let Ok(address) = std::env::var("STARWIRE_TEST_VISIT") else { return };
    let worker = Task::start(WORKER, &[("STARWIRE_REACTORS", "2")]);
    // Two channels: one for each reactor.
    let channels = [PS, "/job:ps/replica:0/task:1"].map(|name| {
        worker.finds(name, address.clone());
        worker.channel(name)
    });
    for channel in &channels {
        recv(channel, 1, "never;0", 0, 0);
    }
    eventually("a connection of each reactor", || count(&worker, "starwire_connections_out") == 2);
    let (waiter, first) = op(false);
    let (held, holds) = std::sync::mpsc::channel();
    let callback = waiter.clone();
    std::thread::spawn(move || {
        let hold = callback.hold();
        held.send(()).unwrap();
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        drop(hold);
    });
    holds.recv().unwrap();
    // The callback makes another request, which nobody may end.
    let channel = &channels[0];
    let (last, last_op) = op(false);
    last.then(|| eprintln!("a callback after the last one"));
    let again = channel.clone();
    waiter.then(move || {
        again.recv(NewRecv { step: 1, prefix: b"key;8"[..].into(), frame: 0, iter: 0, op: last_op });
    });
    channel.recv(NewRecv { step: 1, prefix: b"key;8"[..].into(), frame: 0, iter: 0, op: first });
    eventually("a callback", || waiter.is_ending());
    eprintln!("exits at {}", clock_ms());
    std::process::exit(0);
}

fn clock_ms() -> u128 {
    std::time::UNIX_EPOCH.elapsed().unwrap().as_millis()
}

/// A process that visits this task.
fn visit(ps: &Task, visitor: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", visitor, "--ignored", "--nocapture"]).env("STARWIRE_TEST_VISIT", ps.address());
    // For sanitizer builds: a process that exits mid-work leaves memory and threads behind.
    command.env("ASAN_OPTIONS", "detect_leaks=0").env("TSAN_OPTIONS", "report_thread_leaks=0");
    command
}

#[test]
fn a_process_that_exits_is_no_loss() {
    let ps = Task::start(PS, &[]);
    for visits in 1..4 {
        let visit = visit(&ps, "admission::visitor").output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&visit.stdout), String::from_utf8_lossy(&visit.stderr));
        assert!(visit.status.success(), "{}\n{out}\n{err}", visit.status);
        assert_eq!(count(&ps, "starwire_accepts_total"), visits);
        eventually("the visitor is gone", || count(&ps, "starwire_connections_in") == 0);
        assert_eq!(count(&ps, "starwire_losses_total"), 0);
    }
}

/// A peer answers GOODBYE by ending steps, which a reactor that still makes callbacks would report.
#[test]
fn a_process_that_exits_says_goodbye_when_no_reactor_makes_callbacks() {
    let ps = Task::start(PS, &[]);
    let mut visitor = visit(&ps, "admission::visitor_in_a_callback");
    let mut visitor = visitor.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    let stdin = visitor.stdin.take();
    let mut lines = BufReader::new(visitor.stderr.take().unwrap()).lines();
    let begun: u128 = lines.find_map(|line| line.unwrap().strip_prefix("exits at ")?.parse().ok()).unwrap();
    // GOODBYE would come at once. An exit waits for two seconds.
    std::thread::sleep(Duration::from_millis(200));
    let left = count(&ps, "starwire_connections_in");
    assert!(left == 2 || clock_ms() - begun > 1500, "{left}");
    drop(stdin);
    eventually("the visitor is gone", || count(&ps, "starwire_connections_in") == 0);
    assert!(visitor.wait().unwrap().success());
    let more: Vec<_> = lines.map(Result::unwrap).collect();
    assert!(!more.iter().any(|line| line.contains("a callback after the last one")), "{more:?}");
}

#[test]
fn a_peer_that_ends_without_goodbye_is_a_loss() {
    let ps = Task::start(PS, &[ANY_WAY]);
    let mut peer = connect(&ps);
    peer.write_all(&hello(0, &[])).unwrap();
    assert_eq!(heard(&mut peer).unwrap()[0], WELCOME);
    drop(peer);
    eventually("a loss", || count(&ps, "starwire_losses_total") == 1);
}

#[test]
fn refused_http_clients_are_one_line_in_the_log() {
    let ps = Task::start(PS, &[("STARWIRE_CONTROL", "off")]);
    for _ in 0..50 {
        assert!(
            http(&ps, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                .starts_with("HTTP/1.1 403")
        );
    }
    assert_eq!(ps.logged("HTTP client"), 1, "{:?}", ps.seen.lines.lock().unwrap());
}

#[test]
fn requests_for_too_many_steps_are_refused() {
    let (ps, worker) = pair(&[]);
    let channel = worker.channel(PS);
    let waiters: Vec<_> = (0..5000).map(|step| recv(&channel, step, "never;0", 0, 0).1).collect();
    let again: Vec<_> = (0..500).map(|_| recv(&channel, 7, "never;0", 0, 0).1).collect();
    eventually("answers", || waiters.iter().filter(|waiter| waiter.is_done()).count() == 5000 - 4096);
    let end = waiters[4999].wait();
    assert!(end.code == 8 && end.message.contains("4096 steps"), "{end:?}");
    eventually("arrival", || ps.seen.never.lock().unwrap().len() == 4096 + 500);
    assert!(!again.iter().any(|waiter| waiter.is_done()), "a step that is known is served on");
    // A reply makes room.
    let ticket = ps.seen.never.lock().unwrap()[3];
    ps.engine().reply(ticket, 0, b"", None);
    assert_eq!(waiters[3].wait().code, 0);
    assert_eq!(recv(&channel, 9000, "key;8", 0, 0).1.wait().code, 0);
}

/// Run in its own process by the next test: lends memory that it does not have.
#[test]
#[ignore = "a part of another test"]
fn forger() {
    let Ok(name) = std::env::var("STARWIRE_TEST_FORGE_AT") else { return };
    let mut peer = UnixStream::connect_addr(&SocketAddr::from_abstract_name(name).unwrap()).unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    peer.write_all(&hello(2, &[])).unwrap();
    assert_eq!(heard(&mut peer).unwrap()[0], WELCOME);
    let taken = heard(&mut peer).unwrap();
    assert_eq!((taken[0], taken[8]), (17, 0), "it says that it can read");
    // The witness is valid, but the loan's address is not.
    let witness = Box::new(7u64);
    let (len, at) = (200_000, &raw const *witness as u64);
    let call = frame(CALL, ECHO, 1, &[1 << 32, len | 1 << 63], b"");
    let control = [call, frame(DATA, 0, 1, &[len], b""), frame(LEND, 0, *witness, &[at, 1, 4096, len], b"")].concat();
    peer.write_all(&block(1, &control)).unwrap();
    let _ = peer.read_to_end(&mut Vec::new());
}

#[test]
fn a_forged_loan_ends_lending_for_the_forger_only() {
    let road = [("STARWIRE_UNIX", "auto")];
    let (ps, worker) = pair(&road);
    for _ in 0..2 {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "admission::forger", "--ignored"])
            .env("STARWIRE_TEST_FORGE_AT", format!("starwire-{}", ps.address()))
            .output()
            .unwrap();
        assert!(status.status.success(), "{}", String::from_utf8_lossy(&status.stdout));
    }
    // Forgers may be many: the second is no news.
    eventually("a line in the log", || ps.logged("cannot read the memory that") == 1);
    // Other processes are unaffected.
    let (channel, released) = (worker.channel(PS), Arc::default());
    for _ in 0..20 {
        let parts = vec![pattern(1 << 20, 3)];
        let end = call(&channel, ECHO, b"", Some(payload(parts.clone(), &released)));
        assert!(end.code == 0 && end.parts == parts, "{}", end.message);
    }
    assert!(count(&ps, "starwire_borrowed_bytes_total") > 10 << 20);
}
