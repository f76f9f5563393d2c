//! A cluster with a secret: a relay between two tasks can only cut, and an address leads nowhere but to its task.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use starwire_engine::config::{Config, Identity, ProcessEnv, Protocol};

use crate::admission::{ANY_WAY, CALL, block, connect, frame, heard, meta};
use crate::harness::*;
use crate::{PS, WORKER, count, http};

const SECRET: (&str, &str) = ("STARWIRE_SECRET", "a-secret-of-enough-length");
const TCP: (&str, &str) = ("STARWIRE_UNIX", "off");
/// A relay sees nothing of what goes over queue pairs.
const NO_RDMA: (&str, &str) = ("STARWIRE_TRANSPORT", "tcp");
const GOODBYE: u8 = 22;

/// What a relay makes of a block: its number, and its header and control section.
type Meddle = fn(number: u64, block: Vec<u8>) -> Vec<Vec<u8>>;

/// Passes on what goes to a server, and meddles with it; what comes back passes unchanged.
pub struct Relay {
    pub port: u16,
    meddle: Arc<Mutex<Option<Meddle>>>,
    /// Blocks that were changed, added or left out.
    meddled: Arc<AtomicUsize>,
    /// Bulk bytes are changed.
    spoils: Arc<AtomicBool>,
    clients: Arc<Mutex<Vec<TcpStream>>>,
}

impl Relay {
    pub fn new(target: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (meddle, meddled) = (Arc::new(Mutex::new(None)), Arc::new(AtomicUsize::new(0)));
        let (clients, spoils) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let relay = Self {
            port,
            meddle: meddle.clone(),
            meddled: meddled.clone(),
            spoils: spoils.clone(),
            clients: clients.clone(),
        };
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&target).unwrap());
                clients.lock().unwrap().push(client.try_clone().unwrap());
                let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to);
                    let _ = to.shutdown(Shutdown::Both);
                });
                let (meddle, meddled, spoils) = (meddle.clone(), meddled.clone(), spoils.clone());
                std::thread::spawn(move || pass(client, server, &meddle, &meddled, &spoils));
            }
        });
        relay
    }

    /// For connections that are made from now on.
    pub fn set(&self, meddle: Option<Meddle>) {
        *self.meddle.lock().unwrap() = meddle;
        self.meddled.store(0, Ordering::SeqCst);
        for client in self.clients.lock().unwrap().drain(..) {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}

fn pass(
    mut from: TcpStream,
    mut to: TcpStream,
    meddle: &Mutex<Option<Meddle>>,
    meddled: &AtomicUsize,
    spoils: &AtomicBool,
) {
    let mut step = || -> std::io::Result<()> {
        let mut block = vec![0; 32];
        from.read_exact(&mut block)?;
        let control = u32::from_le_bytes(block[8..12].try_into().unwrap()) as usize;
        block.resize(32 + control, 0);
        from.read_exact(&mut block[32..])?;
        let number = u64::from_le_bytes(block[24..32].try_into().unwrap());
        let mut bulk = vec![0; u64::from_le_bytes(block[16..24].try_into().unwrap()) as usize];
        from.read_exact(&mut bulk)?;
        if let (Some(changed), true) = (bulk.last_mut(), spoils.load(Ordering::SeqCst)) {
            *changed ^= 1;
        }
        let blocks = match *meddle.lock().unwrap() {
            Some(meddle) => meddle(number, block.clone()),
            None => vec![block.clone()],
        };
        if blocks != [block] {
            meddled.fetch_add(1, Ordering::SeqCst);
        }
        to.write_all(&[blocks.concat(), bulk].concat())
    };
    while step().is_ok() {}
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}

/// Gives a block a number and the checksum that fits.
fn numbered(number: u64, mut block: Vec<u8>) -> Vec<u8> {
    block[24..32].copy_from_slice(&number.to_le_bytes());
    block[12..16].fill(0);
    let sum = crc32c::crc32c(&block);
    block[12..16].copy_from_slice(&sum.to_le_bytes());
    block
}

/// A worker that reaches the server through the relay.
fn through(relay: &Relay) -> Task {
    let worker = Task::start(WORKER, &[SECRET, TCP, NO_RDMA]);
    worker.finds(PS, format!("127.0.0.1:{}", relay.port));
    worker
}

#[test]
fn a_relay_can_only_cut() {
    let ps = Task::start(PS, &[SECRET, TCP, NO_RDMA]);
    let relay = Relay::new(ps.address());
    let worker = through(&relay);
    let bystander = Task::start("/job:worker/replica:0/task:1", &[SECRET, TCP, NO_RDMA]);
    bystander.knows(PS, &ps);
    let other = bystander.channel(PS);
    let channel = worker.channel(PS);
    assert_eq!(call(&channel, ECHO, b"as it was", None).meta, b"as it was");
    let attacks: [(&str, Meddle); 6] = [
        // The first byte of a call's metadata.
        ("changes a byte", |number, mut block| {
            block[56] ^= u8::from(number > 1 && block[32] == CALL);
            vec![numbered(number, block)]
        }),
        ("adds a block", |number, block| match number {
            0 | 1 => vec![block],
            _ => vec![self::block(number, &frame(GOODBYE, 0, 0, &[], b"drain")), block],
        }),
        ("repeats a block", |number, block| match number {
            0 | 1 => vec![block],
            _ => vec![block.clone(), numbered(number + 1, block)],
        }),
        ("leaves a block out", |number, block| if number == 2 { vec![] } else { vec![numbered(number, block)] }),
        ("changes the challenge", |number, mut block| {
            block[50] ^= u8::from(number == 0);
            vec![numbered(number, block)]
        }),
        ("changes HELLO", |number, mut block| {
            block[60] ^= u8::from(number == 1);
            vec![numbered(number, block)]
        }),
    ];
    for (what, meddle) in attacks {
        let calls = count(&ps, "starwire_calls_received_total");
        relay.set(Some(meddle));
        let mut made = 0;
        eventually(what, || {
            made += 1;
            let (_, waiter) =
                call_with(&channel, ECHO, b"mine", None, &Options { deadline_ms: 300, ..Options::default() });
            let end = waiter.wait();
            assert!(end.code != 0 || end.meta == b"mine", "{what}: {end:?}");
            assert!(matches!(end.code, 0 | 4 | 14 | 16), "{what}: {end:?}");
            relay.meddled.load(Ordering::SeqCst) > 0 && end.code != 0
        });
        let calls = count(&ps, "starwire_calls_received_total") - calls;
        assert!(calls <= made, "{what}: {calls} calls arrived, {made} were made");
        relay.set(None);
        eventually("the relay relays again", || call(&channel, ECHO, b"mine", None).meta == b"mine");
        assert_eq!(call(&other, ECHO, b"undisturbed", None).meta, b"undisturbed");
    }
    assert_eq!(count(&bystander, "starwire_connects_total"), 1, "over the same connection");
}

/// Bulk bytes have no code, but a request is run by nobody if they are not the sender's.
#[test]
fn a_relay_cannot_change_what_a_request_asks_for() {
    let ps = Task::start(PS, &[SECRET, TCP, NO_RDMA]);
    let relay = Relay::new(ps.address());
    let worker = through(&relay);
    let channel = worker.channel(PS);
    let graph: Vec<u8> = (0..20_000u32).map(|n| n as u8).collect();
    let (small, parts) = (vec![b"small".to_vec()], vec![graph.clone(), b"and".to_vec(), graph.clone()]);
    let released = Arc::default();
    for spoils in [false, true, false] {
        relay.spoils.store(spoils, Ordering::SeqCst);
        for (what, is_bulk) in [(&small, false), (&parts, true)] {
            let calls = count(&ps, "starwire_calls_received_total");
            let end = call(&channel, ECHO, b"meta", Some(payload(what.clone(), &released)));
            if is_bulk && spoils {
                assert_eq!((end.code, count(&ps, "starwire_calls_received_total")), (15, calls), "{end:?}");
                assert!(end.message.contains("was changed on its way"), "{end:?}");
            } else {
                assert_eq!((end.code, &end.meta[..], &end.parts), (0, &b"meta"[..], what), "{spoils}");
            }
        }
    }
}

#[test]
fn an_address_leads_only_to_the_task_that_it_is_for() {
    let other_name = "/job:ps/replica:0/task:1";
    for secret in [Some(SECRET), None] {
        let env: Vec<_> = secret.into_iter().collect();
        let (other, worker) = (Task::start(other_name, &env), Task::start(WORKER, &env));
        // Where a forged answer of a name service would lead.
        worker.knows(PS, &other);
        let end = call(&worker.channel(PS), ECHO, b"hello", None);
        if secret.is_some() {
            assert_eq!(end.code, 9, "{end:?}");
            assert!(end.message.contains(PS) && end.message.contains(other_name), "{end:?}");
        } else {
            assert_eq!(end.meta, b"hello");
        }
    }
}

#[test]
fn a_server_with_a_secret_gives_no_name_away() {
    let ps = Task::start(PS, &[SECRET, TCP, ANY_WAY]);
    let challenge = block(0, &frame(3, 0, 0, &[], &[7; 32]));
    let hello = crate::admission::hello_of("grpc++", 0, &[]);
    for words in [vec![hello.clone()], vec![challenge, numbered(1, hello)]] {
        let mut raw = connect(&ps);
        let mut said = Vec::new();
        for word in words {
            raw.write_all(&word).unwrap();
            said.push(heard(&mut raw).unwrap());
        }
        let refusal = said.pop().unwrap();
        assert_eq!((refusal[0], refusal[2]), (4, 16));
        let reason = String::from_utf8_lossy(meta(&refusal)).into_owned();
        assert!(reason.contains("secret") && !reason.contains("/job:"), "{reason}");
        // Before that, a challenge and nothing else.
        assert!(said.iter().all(|said| said.len() == 48 && said[0] == 3), "{said:?}");
        assert_eq!(raw.read(&mut [0; 1]).unwrap_or(0), 0);
    }
    assert!(
        http(&ps, "GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").starts_with("HTTP/1.1 200")
    );
}

/// Run in its own process by the next test: reads the secret twice, as a process with two servers does.
#[test]
#[ignore = "a part of another test"]
fn reader() {
    if std::env::var_os("STARWIRE_TEST_READ").is_none() {
        return;
    }
    let block = || String::from_utf8_lossy(&std::fs::read("/proc/self/environ").unwrap()).into_owned();
    assert!(block().contains(SECRET.1));
    let read = || {
        let identity = Identity {
            protocol: Protocol::GrpcPlusPlus,
            job: "ps".into(),
            task: PS.into(),
            grpc_address: "127.0.0.1:1".into(),
            tasks: Vec::new(),
            cpus_allowed: 1,
            grpc_gives_way: false,
        };
        Config::from_env(&ProcessEnv, identity).unwrap().secret.unwrap()
    };
    let secret = read();
    assert!(!block().contains(SECRET.1), "{}", block());
    assert_eq!(std::env::var(SECRET.0).unwrap(), "");
    assert!(secret == read() && secret == starwire_engine::config::Secret::new(SECRET.1.as_bytes()));
}

#[test]
fn the_secret_leaves_the_environment() {
    let run = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "secret::reader", "--ignored"])
        .env("STARWIRE_TEST_READ", "yes")
        .env(SECRET.0, SECRET.1)
        .output()
        .unwrap();
    let (out, err) = (String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success() && out.contains("1 passed"), "{}\n{out}\n{err}", run.status);
}
