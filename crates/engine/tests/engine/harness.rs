//! Engines in one process, with an owner written in Rust: echoes calls, produces tensors, counts what it is told.

use std::collections::HashMap;
use std::net::TcpListener;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, Weak};
use std::time::{Duration, Instant};

use starwire_engine::config::{Identity, MapEnv};
use starwire_engine::{
    Buffers, EngineError, Host, IncomingCall, Level, NewCall, NewRecv, Op, OutPayload, PendingOp, Port, RecvRequest,
    Ticket,
};
use starwire_protocol::{Failure, Outcome, code};

#[path = "../verbs/library.rs"]
pub mod fake_library;
#[path = "kernels.rs"]
pub mod kernels;

use kernels::Kernels;

pub const PATIENCE: Duration = Duration::from_secs(60);

/// The address of the parameter server in the ClusterSpec of a task, unless the test gives another.
pub const ELSEWHERE: &str = "somewhere:1";

/// Methods of the echo owner.
pub const ECHO: u16 = 1;
pub const FAIL: u16 = 2;
pub const NEVER: u16 = 3;
pub const SEND_MUCH: u16 = 4;

pub type Engine = starwire_engine::Engine<Echo>;
pub type Channel = starwire_engine::Channel<Echo>;

#[derive(Default)]
pub struct Seen {
    pub lines: Mutex<Vec<String>>,
    pub cancels: Mutex<Vec<(u16, i64, bool)>>,
    /// Tags of requests that had no reply when the connection ended, each with its [`turn`].
    pub cut_off: Mutex<Vec<(i64, u64)>>,
    pub keys_alive: AtomicU64,
    pub never: Mutex<Vec<Ticket>>,
    pub released: Arc<AtomicU64>,
    pub kernels: Arc<kernels::Seen>,
    engine: Mutex<Weak<Engine>>,
}

pub struct Task {
    pub engine: Option<Arc<Engine>>,
    pub seen: Arc<Seen>,
    /// Addresses by task.
    known: Mutex<HashMap<String, String>>,
}

/// The owner of a task's engine.
pub struct Echo(Arc<Seen>, Kernels);

impl Echo {
    fn reply(&self, ticket: Ticket, code: i32, meta: &[u8], payload: Option<OutPayload>) {
        let engine = self.0.engine.lock().unwrap().upgrade();
        if let Some(engine) = engine {
            engine.reply(ticket, code, meta, payload);
        }
    }

    fn payload(&self, bytes: Vec<Vec<u8>>) -> Option<OutPayload> {
        Some(payload(bytes, &self.0.released))
    }
}

impl Host for Echo {
    type Key = String;
    type Op = Request;
    type Star = Kernels;

    fn key(&self, prefix: &[u8]) -> Option<String> {
        let text = String::from_utf8(prefix.to_vec()).unwrap();
        if text.starts_with("bad") {
            return None;
        }
        self.0.keys_alive.fetch_add(1, Ordering::Relaxed);
        Some(text)
    }

    fn key_gone(&self, _key: String) {
        self.0.keys_alive.fetch_sub(1, Ordering::Relaxed);
    }

    /// The value of a rendezvous key "…;N bytes of B": N bytes B.
    fn recv(&self, requests: &[RecvRequest<String>]) {
        for request in requests {
            let key = &request.key;
            if key.contains("never") {
                self.0.never.lock().unwrap().push(request.ticket);
                continue;
            }
            let size: usize = key.rsplit(';').next().unwrap().parse().unwrap_or(0);
            let fill = (request.step as u8) ^ (request.frame as u8) ^ (request.iter as u8);
            self.reply(request.ticket, 0, format!("meta of {key}").as_bytes(), self.payload(vec![vec![fill; size]]));
        }
    }

    fn takes_calls(&self) -> bool {
        true
    }

    fn star(&self) -> Option<&Kernels> {
        Some(&self.1)
    }

    fn call(&self, call: IncomingCall) {
        let (ticket, meta) = (call.ticket, call.body.meta());
        let is_aligned = |part: &[u8]| part.is_empty() || part.as_ptr().align_offset(64) == 0;
        assert!(call.body.parts().all(is_aligned), "parts are aligned");
        match call.method {
            ECHO => {
                let copies: Vec<Vec<u8>> = call.body.parts().map(<[u8]>::to_vec).collect();
                let payload = if copies.is_empty() { None } else { self.payload(copies) };
                self.reply(ticket, 0, meta, payload);
            }
            FAIL => self.reply(ticket, 5, b"no such thing", self.payload(vec![b"details".to_vec()])),
            NEVER => self.0.never.lock().unwrap().push(ticket),
            SEND_MUCH => {
                let size: usize = std::str::from_utf8(meta).unwrap().parse().unwrap();
                self.reply(ticket, 0, b"", self.payload(vec![vec![7; size]]));
            }
            other => self.reply(ticket, code::UNIMPLEMENTED, format!("method {other}").as_bytes(), None),
        }
    }

    fn cancelled(&self, _ticket: Ticket, method: u16, tag: i64, peer_gone: bool) {
        if peer_gone {
            self.0.cut_off.lock().unwrap().push((tag, turn()));
        }
        self.0.cancels.lock().unwrap().push((method, tag, peer_gone));
    }

    fn log(&self, _level: Level, line: &str) {
        self.0.lines.lock().unwrap().push(line.to_owned());
    }
}

struct Counted {
    bytes: Vec<u8>,
    /// Of the payload that it is part of: counted when the last part is gone.
    _release: Arc<Release>,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

struct Release(Arc<AtomicU64>);

impl Drop for Release {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A payload that counts its release.
pub fn payload(bytes: Vec<Vec<u8>>, released: &Arc<AtomicU64>) -> OutPayload {
    let release = Arc::new(Release(released.clone()));
    OutPayload::of(bytes.into_iter().map(|bytes| Counted { bytes, _release: release.clone() }).collect())
}

impl Task {
    pub fn start(name: &str, env: &[(&str, &str)]) -> Self {
        Self::try_start(name, "grpc++", 1, env).unwrap()
    }

    pub fn try_start(name: &str, protocol: &str, incarnation: u64, env: &[(&str, &str)]) -> Result<Self, EngineError> {
        Self::start_behind(name, protocol, incarnation, env, ["localhost:0", ELSEWHERE], |_| {})
    }

    /// With this address of its own in the ClusterSpec.
    pub fn start_at(name: &str, incarnation: u64, env: &[(&str, &str)], own: &str) -> Self {
        Self::try_start_at(name, incarnation, env, own).unwrap()
    }

    pub fn try_start_at(name: &str, incarnation: u64, env: &[(&str, &str)], own: &str) -> Result<Self, EngineError> {
        Self::start_behind(name, "grpc++", incarnation, env, [own, ELSEWHERE], |_| {})
    }

    /// With these addresses of its own and of the parameter server in the ClusterSpec. If the environment has
    /// STARWIRE_PORTS=one, `listens` does what TensorFlow's server would behind the port; otherwise there is none.
    pub fn start_behind(
        name: &str,
        protocol: &str,
        incarnation: u64,
        env: &[(&str, &str)],
        [own, ps]: [&str; 2],
        listens: impl FnOnce(&Port),
    ) -> Result<Self, EngineError> {
        let seen = Arc::new(Seen::default());
        let mut vars = MapEnv::new("/nonexistent");
        // STARWIRE_TEST_TRANSPORT=verbs: the same tests over queue pairs of the fake libibverbs.
        if std::env::var("STARWIRE_TEST_TRANSPORT").is_ok_and(|transport| transport == "verbs") {
            vars = vars.set("STARWIRE_TRANSPORT", "verbs").set("STARWIRE_VERBS_FALLBACK", "false");
            vars = vars.set("STARWIRE_VERBS_LIBRARY", fake_library::path()).set("STARWIRE_UNIX", "off");
        }
        for (name, value) in env {
            vars = vars.set(name, value);
        }
        let identity = Identity {
            protocol: protocol.parse().unwrap(),
            job: name.split(['/', ':']).nth(2).unwrap().into(),
            task: name.into(),
            grpc_address: own.into(),
            tasks: vec![("/job:ps/replica:0/task:0".into(), ps.into())],
            cpus_allowed: 2,
            grpc_gives_way: true,
        };
        let is_behind = env.contains(&("STARWIRE_PORTS", "one"));
        let port = if is_behind { Port::bind(&vars, identity.clone(), 0)? } else { None };
        if let Some(port) = &port {
            listens(port);
        }
        let engine =
            Engine::start(&vars, identity, incarnation, Echo(seen.clone(), Kernels(seen.kernels.clone())), port)?;
        *seen.kernels.engine.lock().unwrap() = Arc::downgrade(&engine);
        *seen.engine.lock().unwrap() = Arc::downgrade(&engine);
        Ok(Self { engine: Some(engine), seen, known: Mutex::default() })
    }

    pub fn engine(&self) -> &Arc<Engine> {
        self.engine.as_ref().unwrap()
    }

    /// Where the data port answers.
    pub fn address(&self) -> String {
        self.engine().bound().to_string().replace("0.0.0.0", "127.0.0.1")
    }

    /// Lets this task find the other.
    pub fn knows(&self, name: &str, other: &Task) {
        self.finds(name, other.address());
    }

    /// From now on, channels to a task lead to this address.
    pub fn finds(&self, name: &str, address: String) {
        self.known.lock().unwrap().insert(name.into(), address);
    }

    /// A channel to a task; to a port that nobody listens on if its address is not known.
    pub fn channel(&self, task: &str) -> Channel {
        let address = self.known.lock().unwrap().get(task).cloned();
        self.engine().channel(task, &address.unwrap_or_else(|| "127.0.0.1:1".into())).unwrap()
    }

    pub fn stop(&mut self) {
        *self.seen.engine.lock().unwrap() = Weak::new();
        if let Some(engine) = self.engine.take() {
            engine.stop();
        }
    }

    pub fn logged(&self, part: &str) -> usize {
        self.seen.lines.lock().unwrap().iter().filter(|l| l.contains(part)).count()
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Numbers events of all tasks of this process in their order.
fn turn() -> u64 {
    static TURNS: AtomicU64 = AtomicU64::new(0);
    TURNS.fetch_add(1, Ordering::Relaxed)
}

/// A port that nobody listens on. The kernel gives it to no connection, and to no test beside this one that asks for
/// port 0.
///
/// A server binds its port some time after it was chosen, so each process has ports of its own: it holds an abstract
/// unix socket, which exists once per network namespace like the ports. `tests/python/own_ports.py` does the same with
/// ports from 10,000 on. In odd thousands are ports at an offset from one of these, which nobody draws.
pub fn free_port() -> u16 {
    const SHARES: u16 = 64;
    static OWN: OnceLock<(UnixListener, Vec<u16>)> = OnceLock::new();
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let (_lock, ports) = OWN.get_or_init(|| {
        let begin = std::process::id() as u16 % SHARES;
        let take = |number: u16| {
            let share = (begin + number) % SHARES;
            let name = SocketAddr::from_abstract_name(format!("starwire-rust-test-ports-{share}")).unwrap();
            let is_own = |port: &u16| port / 1000 % 2 == 0 && port % SHARES == share;
            UnixListener::bind_addr(&name).ok().map(|lock| (lock, (2048..10_000).filter(is_own).collect()))
        };
        (0..SHARES).find_map(take).expect("fewer processes of tests than shares of ports")
    });
    for _ in 0..ports.len() {
        // The next process with this share begins at another place.
        let at = (std::process::id() as usize).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        let port = ports[at % ports.len()];
        if TcpListener::bind(("0.0.0.0", port)).is_ok() {
            return port;
        }
    }
    panic!("none of {ports:?} is free");
}

/// The sockets with the name of a task's unix socket: the listener, and a connection for each peer.
pub fn unix_sockets(of: &Task) -> usize {
    let bound = of.engine().bound().to_string();
    let name = format!("@starwire-{}", bound.replace("0.0.0.0", "*").replace(['[', ']'], ""));
    let sockets = std::fs::read_to_string("/proc/self/net/unix").unwrap();
    sockets.lines().filter(|line| line.ends_with(&name)).count()
}

/// What a call came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct End {
    pub code: i32,
    pub message: String,
    pub meta: Vec<u8>,
    pub from_peer: bool,
    pub parts: Vec<Vec<u8>>,
}

#[derive(Default)]
pub struct Waiter {
    end: Mutex<Option<End>>,
    changed: Condvar,
    /// The [`turn`] of its end.
    turn: AtomicU64,
    /// The callback of its end has begun.
    ending: AtomicBool,
    /// Called at the end of that callback.
    then: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

/// An outgoing request that its test waits for.
pub struct Request {
    waiter: Arc<Waiter>,
    refuse: bool,
}

impl Waiter {
    pub fn wait(&self) -> End {
        let until = Instant::now() + PATIENCE;
        let mut end = self.end.lock().unwrap();
        while end.is_none() {
            let left = until.checked_duration_since(Instant::now()).expect("the call ends in time");
            end = self.changed.wait_timeout(end, left).unwrap().0;
        }
        end.clone().unwrap()
    }

    /// Until the guard is dropped, the callback of its end does not return.
    pub fn hold(&self) -> MutexGuard<'_, Option<End>> {
        self.end.lock().unwrap()
    }

    /// Before the request ends: what the callback of its end does last.
    pub fn then(&self, act: impl FnOnce() + Send + 'static) {
        *self.then.lock().unwrap() = Some(Box::new(act));
    }

    pub fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    pub fn is_done(&self) -> bool {
        self.end.lock().unwrap().is_some()
    }

    /// After [`Self::wait`].
    pub fn turn(&self) -> u64 {
        self.turn.load(Ordering::Relaxed)
    }
}

impl Op for Request {
    fn alloc(&mut self, _meta: &[u8], lens: &[u64]) -> Result<Buffers, Failure> {
        if self.refuse {
            return Err(Failure { code: code::RESOURCE_EXHAUSTED, message: "refused by the test".into() });
        }
        Ok(Buffers::owned(lens.iter().map(|len| vec![0xEE; *len as usize]).collect()))
    }

    fn done(self, outcome: &Outcome<'_>, buffers: Buffers) {
        let (code, message, meta, from_peer) = match outcome {
            Outcome::Ok { meta } => (0, "", *meta, true),
            Outcome::PeerError { code, message, details } => (*code, *message, *details, true),
            Outcome::Local { code, message } | Outcome::Lost { code, message } => (*code, *message, &b""[..], false),
        };
        self.waiter.ending.store(true, Ordering::Release);
        let end = End { code, message: message.into(), meta: meta.to_vec(), from_peer, parts: buffers.into_owned() };
        let mut place = self.waiter.end.lock().unwrap();
        assert!(place.is_none(), "a call ends once");
        self.waiter.turn.store(turn(), Ordering::Relaxed);
        *place = Some(end);
        drop(place);
        self.waiter.changed.notify_all();
        let then = self.waiter.then.lock().unwrap().take();
        if let Some(act) = then {
            act();
        }
    }
}

pub fn op(refuse: bool) -> (Arc<Waiter>, PendingOp<Request>) {
    let waiter = Arc::new(Waiter::default());
    (waiter.clone(), PendingOp::new(Request { waiter, refuse }))
}

#[derive(Default)]
pub struct Options {
    pub deadline_ms: u32,
    pub wait_for_ready: bool,
    pub deadline_to_connect: bool,
    pub refuse: bool,
}

pub fn call_with(
    channel: &Channel,
    method: u16,
    meta: &[u8],
    payload: Option<OutPayload>,
    options: &Options,
) -> (u64, Arc<Waiter>) {
    let (waiter, op) = op(options.refuse);
    let id = channel.call(NewCall {
        method: method.into(),
        meta: meta.to_vec(),
        payload,
        deadline_ms: options.deadline_ms,
        wait_for_ready: options.wait_for_ready,
        deadline_to_connect: options.deadline_to_connect,
        op,
    });
    (id, waiter)
}

pub fn call(channel: &Channel, method: u16, meta: &[u8], payload: Option<OutPayload>) -> End {
    call_with(channel, method, meta, payload, &Options::default()).1.wait()
}

pub fn recv(channel: &Channel, step: i64, prefix: &str, frame: u64, iter: u64) -> (u64, Arc<Waiter>) {
    let (waiter, op) = op(false);
    let id = channel.recv(NewRecv { step, prefix: prefix.as_bytes().into(), frame, iter, op });
    (id, waiter)
}

pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < until, "{what} did not happen");
        std::thread::sleep(Duration::from_millis(2));
    }
}
