//! A task without TensorFlow: hands out tensors of any size and requests them from others. `starctl bench` measures
//! with it.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use starwire_engine::config::{Env, Identity};
use starwire_engine::{
    Buffers, EngineError, Host, IncomingCall, Level, NewCall, NewRecv, Op, OutPayload, PendingOp, RecvRequest,
};
use starwire_protocol::{Failure, Outcome, code};

/// Largest tensor that is handed out.
pub const MAX_SIZE: usize = 1 << 30;
/// The content of all tensors.
const FILL: u8 = 0xA5;
/// The only method: answers with what it was sent.
const ECHO: u16 = 1;

type Engine = starwire_engine::Engine<TaskHost>;
type Channel = starwire_engine::Channel<TaskHost>;

/// A running task.
pub struct Task {
    engine: Arc<Engine>,
}

impl Task {
    pub fn start(env: &dyn Env, identity: Identity, incarnation: u64) -> Result<Self, EngineError> {
        let shared = Arc::new(Shared::default());
        let engine = Engine::start(env, identity, incarnation, TaskHost(shared.clone()), None)?;
        // No request can have come before: nobody knows the address yet.
        let _ = shared.engine.set(Arc::downgrade(&engine));
        Ok(Self { engine })
    }

    pub fn banner(&self) -> &str {
        self.engine.banner()
    }

    /// Where the data port listens.
    pub fn bound(&self) -> SocketAddr {
        self.engine.bound()
    }

    /// Another task, which has one port.
    pub fn peer(&self, task: &str, address: &str) -> Result<Peer, EngineError> {
        Ok(Peer { channel: self.engine.channel(task, address)?, spare: Arc::default() })
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.engine.stop();
    }
}

/// The connections to another task.
pub struct Peer {
    channel: Channel,
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Peer {
    /// One method call without payload, there and back.
    pub fn call(&self, timeout: Duration) -> Result<Duration, String> {
        let batch = Arc::new(Batch::new(1));
        let begun = Instant::now();
        let deadline_ms = u32::try_from(timeout.as_millis()).map_err(|_| format!("{timeout:?} is too long"))?;
        let op = self.op(&batch, Vec::new());
        self.channel.call(NewCall {
            method: ECHO.into(),
            meta: Vec::new(),
            payload: None,
            deadline_ms,
            wait_for_ready: false,
            deadline_to_connect: false,
            op,
        });
        batch.wait(begun, timeout)
    }

    /// Requests `count` tensors of `size` bytes at once and waits for the last byte of the last. Each one is checked.
    pub fn tensors(&self, step: i64, keys: &Keys, timeout: Duration) -> Result<Duration, String> {
        let batch = Arc::new(Batch::new(keys.prefixes.len()));
        let buffers: Vec<Vec<u8>> = keys.prefixes.iter().map(|_| self.spare_buffer(keys.size)).collect();
        let begun = Instant::now();
        for (prefix, buffer) in keys.prefixes.iter().zip(buffers) {
            let op = self.op(&batch, buffer);
            self.channel.recv(NewRecv { step, prefix: prefix.clone(), frame: 0, iter: 0, op });
        }
        batch.wait(begun, timeout)
    }

    fn op(&self, batch: &Arc<Batch>, buffer: Vec<u8>) -> PendingOp<Request> {
        PendingOp::new(Request { batch: Arc::clone(batch), buffer, spare: Arc::clone(&self.spare) })
    }

    /// Memory that was used before, so that the kernel's page faults are not measured.
    fn spare_buffer(&self, size: usize) -> Vec<u8> {
        let mut buffer = lock(&self.spare).pop().unwrap_or_default();
        buffer.resize(size, 0);
        // A reply that never came must not look like one that did.
        mark_unwritten(&mut buffer);
        buffer
    }
}

/// The rendezvous keys of a step: as long as TensorFlow's.
pub struct Keys {
    prefixes: Vec<Box<[u8]>>,
    size: usize,
}

impl Keys {
    pub fn new(count: usize, size: usize) -> Self {
        let prefix = |i| {
            format!(
                "/job:starctl/replica:0/task:0/device:CPU:0;0123456789abcdef;/job:starctl/replica:0/task:1/device:CPU:0;edge_{i}_variable/read:0;{size}"
            )
        };
        Self { prefixes: (0..count).map(|i| prefix(i).into_bytes().into_boxed_slice()).collect(), size }
    }

    /// Payload of a step.
    pub fn bytes(&self) -> usize {
        self.size * self.prefixes.len()
    }

    pub fn count(&self) -> usize {
        self.prefixes.len()
    }
}

/// What a task and its engine share.
#[derive(Default)]
struct Shared {
    engine: OnceLock<Weak<Engine>>,
    /// The bytes of all tensors that are handed out: the longest so far.
    content: Mutex<Arc<Vec<u8>>>,
}

struct TaskHost(Arc<Shared>);

/// The first bytes of a shared vector.
struct Content(Arc<Vec<u8>>, usize);

impl AsRef<[u8]> for Content {
    fn as_ref(&self) -> &[u8] {
        &self.0[..self.1]
    }
}

impl TaskHost {
    fn engine(&self) -> Option<Arc<Engine>> {
        self.0.engine.get()?.upgrade()
    }

    fn tensor(&self, size: usize) -> OutPayload {
        let mut content = lock(&self.0.content);
        if content.len() < size {
            *content = Arc::new(vec![FILL; size]);
        }
        OutPayload::of(vec![Content(Arc::clone(&content), size)])
    }
}

impl Host for TaskHost {
    /// A tensor's length.
    type Key = usize;
    type Op = Request;
    type Star = Infallible;

    /// A key says how long its tensor is: "...;SIZE".
    fn key(&self, prefix: &[u8]) -> Option<usize> {
        let size = std::str::from_utf8(prefix).ok()?.rsplit(';').next()?.parse().ok()?;
        (size <= MAX_SIZE).then_some(size)
    }

    fn key_gone(&self, _key: usize) {}

    fn recv(&self, requests: &[RecvRequest<usize>]) {
        let Some(engine) = self.engine() else { return };
        for request in requests {
            engine.reply(request.ticket, 0, b"", Some(self.tensor(request.key)));
        }
    }

    fn takes_calls(&self) -> bool {
        true
    }

    fn call(&self, call: IncomingCall) {
        let Some(engine) = self.engine() else { return };
        match call.method {
            ECHO => engine.reply(call.ticket, 0, call.body.meta(), None),
            _ => engine.reply(call.ticket, code::UNIMPLEMENTED, b"starctl has no such method", None),
        }
    }

    fn log(&self, level: Level, line: &str) {
        if level != Level::Info {
            crate::output::complain(line);
        }
    }
}

/// Requests that are waited for together.
struct Batch {
    state: Mutex<Pending>,
    done: Condvar,
}

struct Pending {
    left: usize,
    ended: Instant,
    failure: Option<String>,
}

impl Batch {
    fn new(count: usize) -> Self {
        Self { state: Mutex::new(Pending { left: count, ended: Instant::now(), failure: None }), done: Condvar::new() }
    }

    fn finish(&self, failure: Option<String>) {
        let mut state = lock(&self.state);
        state.left = state.left.checked_sub(1).expect("each call ends once");
        state.failure = state.failure.take().or(failure);
        if state.left == 0 {
            state.ended = Instant::now();
            self.done.notify_one();
        }
    }

    fn wait(&self, begun: Instant, limit: Duration) -> Result<Duration, String> {
        let state = lock(&self.state);
        let (state, _) =
            self.done.wait_timeout_while(state, limit, |state| state.left > 0).unwrap_or_else(PoisonError::into_inner);
        if state.left > 0 {
            return Err(format!("{} replies missing after {limit:?}", state.left));
        }
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(state.ended.saturating_duration_since(begun)),
        }
    }
}

/// One request and the memory for its answer.
struct Request {
    batch: Arc<Batch>,
    buffer: Vec<u8>,
    spare: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Op for Request {
    fn alloc(&mut self, _meta: &[u8], lens: &[u64]) -> Result<Buffers, Failure> {
        match lens {
            [len] if *len == self.buffer.len() as u64 => Ok(Buffers::owned(vec![std::mem::take(&mut self.buffer)])),
            _ => Err(Failure {
                code: code::INVALID_ARGUMENT,
                message: format!("a tensor of {} bytes was requested, and {lens:?} came", self.buffer.len()),
            }),
        }
    }

    fn done(self, outcome: &Outcome<'_>, buffers: Buffers) {
        let buffer = buffers.into_owned().pop().unwrap_or(self.buffer);
        let failure = match outcome {
            Outcome::Ok { .. } if is_written(&buffer) => None,
            Outcome::Ok { .. } => Some("a tensor arrived with the wrong content".to_owned()),
            Outcome::PeerError { message, .. } | Outcome::Local { message, .. } | Outcome::Lost { message, .. } => {
                Some((*message).to_owned())
            }
        };
        lock(&self.spare).push(buffer);
        self.batch.finish(failure);
    }
}

fn mark_unwritten(buffer: &mut [u8]) {
    for at in samples(buffer.len()) {
        buffer[at] = 0;
    }
}

fn is_written(buffer: &[u8]) -> bool {
    samples(buffer.len()).all(|at| buffer[at] == FILL)
}

/// Positions that are checked. To check every byte would be measured as well.
fn samples(len: usize) -> impl Iterator<Item = usize> {
    [0, len / 2, len.saturating_sub(1)].into_iter().filter(move |at| *at < len)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use starwire_engine::config::{MapEnv, Protocol};

    const TIMEOUT: Duration = Duration::from_secs(20);

    fn start(index: usize, env: &MapEnv) -> Task {
        let identity = Identity {
            protocol: Protocol::GrpcPlusPlus,
            job: "starctl".to_owned(),
            task: format!("/job:starctl/replica:0/task:{index}"),
            grpc_address: "localhost:0".to_owned(),
            tasks: (0..3).map(|i| (format!("/job:starctl/replica:0/task:{i}"), format!("localhost:{i}"))).collect(),
            cpus_allowed: 2,
            grpc_gives_way: true,
        };
        Task::start(env, identity, 7).unwrap()
    }

    fn peer(from: &Task, index: usize, to: &Task) -> Peer {
        from.peer(&format!("/job:starctl/replica:0/task:{index}"), &to.bound().to_string()).unwrap()
    }

    #[test]
    fn calls_and_tensors_go_there_and_back() {
        for unix in ["off", "auto"] {
            let env = MapEnv::new("/nonexistent").set("STARWIRE_UNIX", unix);
            let (server, client) = (start(0, &env), start(1, &env));
            let peer = peer(&client, 0, &server);
            peer.call(TIMEOUT).unwrap();
            for (count, size) in [(1, 0), (3, 100), (2, 1 << 20)] {
                let keys = Keys::new(count, size);
                assert_eq!((keys.count(), keys.bytes()), (count, count * size));
                for step in 0..3 {
                    peer.tensors(step, &keys, TIMEOUT).unwrap();
                }
            }
        }
    }

    #[test]
    fn failures_say_why() {
        let env = MapEnv::new("/nonexistent");
        let client = start(1, &env);
        let nowhere = client.peer("/job:starctl/replica:0/task:0", "nonsense").map(drop).unwrap_err();
        assert!(nowhere.to_string().contains("\"nonsense\""), "{nowhere}");
        let server = start(0, &env);
        // Whoever answers at the address is the peer, whatever the client calls it.
        peer(&client, 2, &server).call(TIMEOUT).unwrap();
        let peer = peer(&client, 0, &server);
        peer.call(TIMEOUT).unwrap();
        let too_large = Keys { size: 8, ..Keys::new(1, MAX_SIZE + 1) };
        assert!(peer.tensors(1, &too_large, TIMEOUT).is_err());
        let not_what_was_asked_for = Keys { size: 8, ..Keys::new(1, 9) };
        assert!(peer.tensors(1, &not_what_was_asked_for, TIMEOUT).is_err());
    }
}
