//! Channels: the caller's handle, and the shard's side of it with queue, address look-up, connecting and back-off.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::command::{Command, NewCall, NewRecv};
use crate::config::MapLine;
use crate::host::{Host, Op};
use crate::op::PendingOp;
use crate::shared::Shared;
use crate::whereabouts::Expected;
use starwire_net::transport::SocketAddress;
use starwire_protocol::{Failure, Outcome};

/// Requests may wait for a peer for as long as their deadline lets them (TensorFlow waits for tasks that start later):
/// after this time, the log says for whom and why …
const PATIENCE: Duration = Duration::from_secs(5);
/// … and again.
const REMINDER: Duration = Duration::from_secs(60);

/// The part of a channel that callers and its shard share.
pub struct ChannelShared {
    pub(crate) number: u32,
    pub(crate) shard: usize,
    /// "/job:ps/replica:0/task:0"
    pub(crate) task: String,
    /// The peer's entry in the ClusterSpec, for messages.
    pub(crate) grpc_address: String,
    /// From .endpoint_map, else the peer's gRPC port is asked.
    pub(crate) mapped: Option<MapLine>,
    /// The server's own cluster says that this task is there. Sessions may bring clusters in which servers have other
    /// names than they were started with.
    named: bool,
    next_id: AtomicU64,
}

impl ChannelShared {
    pub fn new(number: u32, shard: usize, task: String, grpc_address: String, mapped: Option<MapLine>) -> Self {
        Self { number, shard, task, grpc_address, mapped, named: true, next_id: AtomicU64::new(1) }
    }

    pub fn unnamed(self) -> Self {
        Self { named: false, ..self }
    }
}

/// A caller's handle.
pub struct Channel<H: Host> {
    shared: Arc<Shared<H>>,
    channel: Arc<ChannelShared>,
}

impl<H: Host> Clone for Channel<H> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), channel: self.channel.clone() }
    }
}

impl<H: Host> Channel<H> {
    pub(crate) fn new(shared: Arc<Shared<H>>, channel: Arc<ChannelShared>) -> Self {
        Self { shared, channel }
    }

    /// A reply arrived that carries so many tensors as one.
    pub fn count_fused(&self, tensors: u64) {
        self.shared.metrics.count(|cells| {
            cells.fused_messages_received.add(1);
            cells.fused_tensors_received.add(tensors);
        });
    }

    pub fn call(&self, call: NewCall<H::Op>) -> u64 {
        let id = self.next_id();
        self.send(Command::Call { channel: self.channel.number, id, call });
        id
    }

    pub fn recv(&self, recv: NewRecv<H::Op>) -> u64 {
        let id = self.next_id();
        self.send(Command::Recv { channel: self.channel.number, id, recv });
        id
    }

    pub fn cancel(&self, id: u64, code: i32, message: String) {
        self.send(Command::Cancel { channel: self.channel.number, id, code, message });
    }

    pub fn task(&self) -> &str {
        &self.channel.task
    }

    fn next_id(&self) -> u64 {
        self.channel.next_id.fetch_add(1, Ordering::Relaxed)
    }

    fn send(&self, command: Command<H::Op>) {
        self.shared.send(self.channel.shard, command);
    }
}

/// A call that waits for a connection.
pub struct Waiting<O: Op> {
    pub id: u64,
    pub what: What<O>,
    pub deadline: Option<Instant>,
    pub wait_for_ready: bool,
}

pub enum What<O: Op> {
    Call(NewCall<O>),
    Recv(NewRecv<O>),
}

impl<O: Op> What<O> {
    /// Notes when and what for the op began.
    pub fn stamp(&mut self, now: Instant) {
        match self {
            What::Call(c) => c.op.started = Some(now),
            What::Recv(r) => {
                r.op.started = Some(now);
                r.op.is_tensor = true;
            }
        }
    }

    pub fn into_op(self) -> PendingOp<O> {
        match self {
            What::Call(c) => c.op,
            What::Recv(r) => r.op,
        }
    }
}

pub enum State {
    /// Nobody wants anything.
    Idle,
    /// The owner or the name service was asked for the peer's address.
    LookingUp,
    /// The attempt failed, and the peer's gRPC port is asked what to make of that.
    Asking {
        failure: Failure,
    },
    /// One candidate is being tried; `conn` is its key. `rest` are the ones to try next.
    Connecting {
        conn: u64,
        rest: VecDeque<SocketAddress>,
    },
    Ready {
        conn: u64,
    },
    /// Somebody waits, but not before `retry`.
    BackingOff,
}

/// A shard's side of a channel.
pub struct ChannelState<O: Op> {
    pub shared: Arc<ChannelShared>,
    pub state: State,
    pub waiting: VecDeque<Waiting<O>>,
    /// Number of the connection attempt; answers to older ones are ignored.
    pub attempt: u32,
    /// When the current attempt is given up.
    pub attempt_ends: Option<Instant>,
    /// No new attempt before this.
    pub not_before: Option<Instant>,
    /// The first attempt since somebody wants a connection and there is none.
    pub wanted_since: Option<Instant>,
    failures: u32,
    /// When the first of these failures was, and when the log last spoke of them.
    unreachable_since: Option<Instant>,
    told: Option<Instant>,
    /// Incarnation of the peer that we were connected to last.
    pub incarnation: Option<u64>,
    /// Who has to answer at the addresses of this attempt.
    pub expected: Option<Expected>,
    /// With a map: the peer calls itself what it is called here, for all we know.
    pub goes_by_name: bool,
    /// A life that was advertised and not met where it was said to be; it is asked for once more.
    pub doubted: Option<u64>,
    /// With a map: since when the peer answers on its gRPC port and is not to be found at its data address.
    pub answers_since: Option<Instant>,
    /// A server of ours answered this attempt, and did not want us.
    pub was_refused: bool,
    /// RDMA did not work on the way to this peer: not before this again.
    pub no_pairs_before: Option<Instant>,
    /// What went wrong with the candidates of this attempt.
    pub errors: Vec<String>,
}

impl<O: Op> ChannelState<O> {
    pub fn new(shared: Arc<ChannelShared>) -> Self {
        Self {
            goes_by_name: shared.named,
            shared,
            state: State::Idle,
            waiting: VecDeque::new(),
            attempt: 0,
            attempt_ends: None,
            not_before: None,
            wanted_since: None,
            failures: 0,
            unreachable_since: None,
            told: None,
            incarnation: None,
            expected: None,
            doubted: None,
            answers_since: None,
            was_refused: false,
            no_pairs_before: None,
            errors: Vec::new(),
        }
    }

    pub fn succeeded(&mut self) {
        self.failures = 0;
        self.unreachable_since = None;
        self.told = None;
        self.not_before = None;
        self.attempt_ends = None;
        self.doubted = None;
        self.answers_since = None;
        self.errors.clear();
    }

    /// Counts a failed attempt and says how long to wait before the next: 20 ms, growing to half a second, with ±25 %
    /// jitter so that a thousand workers do not come back in step. An attempt without a map asks for the address over
    /// TensorFlow's gRPC first, which itself tries to connect once a second: what is waited here comes on top of that.
    pub fn failed(&mut self, now: Instant, random: u64) {
        let base = 20u64.saturating_mul(1 << self.failures.min(7)).min(500);
        self.failures = self.failures.saturating_add(1);
        let jittered = base * 3 / 4 + random % (base / 2 + 1);
        self.not_before = Some(now + Duration::from_millis(jittered));
        self.attempt_ends = None;
    }

    /// What those hear who waited for an attempt that failed.
    pub fn unreachable(&self, failure: &Failure) -> String {
        format!("starwire: cannot reach {} ({}): {}", self.shared.task, self.shared.grpc_address, failure.message)
    }

    /// Whether the log must say now that requests wait for a peer that cannot be reached: soon, and then once a minute.
    pub fn should_tell(&mut self, now: Instant, somebody_waits: bool) -> bool {
        let since = *self.unreachable_since.get_or_insert(now);
        let due = self.told.map_or(since + PATIENCE, |at| at + REMINDER);
        if !somebody_waits || now < due {
            return false;
        }
        self.told = Some(now);
        true
    }

    /// Ends those who wait: all of them, or only those that do not want to wait for another attempt. Says how many.
    pub fn fail_waiting(&mut self, code: i32, message: &str, also_patient: bool) -> u64 {
        let waiting = std::mem::take(&mut self.waiting);
        let mut ended = 0;
        for w in waiting {
            if w.wait_for_ready && !also_patient {
                self.waiting.push_back(w);
            } else {
                w.what.into_op().done(&Outcome::Local { code, message });
                ended += 1;
            }
        }
        ended
    }

    /// Ends those whose deadline has passed. Says how many.
    pub fn expire_waiting(&mut self, now: Instant) -> u64 {
        if self.waiting.iter().all(|w| w.deadline.is_none_or(|d| d > now)) {
            return 0;
        }
        let mut ended = 0;
        let message = format!(
            "starwire: deadline exceeded while waiting for a connection to {} ({})",
            self.shared.task,
            self.errors.last().map_or("no attempt has failed yet", String::as_str)
        );
        let waiting = std::mem::take(&mut self.waiting);
        for w in waiting {
            if w.deadline.is_some_and(|d| d <= now) {
                w.what.into_op().done(&Outcome::Local { code: 4, message: &message });
                ended += 1;
            } else {
                self.waiting.push_back(w);
            }
        }
        ended
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.waiting.iter().filter_map(|w| w.deadline).min()
    }

    pub fn cancel_waiting(&mut self, id: u64, code: i32, message: &str) -> bool {
        let Some(at) = self.waiting.iter().position(|w| w.id == id) else { return false };
        if let Some(w) = self.waiting.remove(at) {
            w.what.into_op().done(&Outcome::Local { code, message });
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Buffers;

    enum NoOp {}

    impl Op for NoOp {
        fn alloc(&mut self, _meta: &[u8], _lens: &[u64]) -> Result<Buffers, Failure> {
            match *self {}
        }
        fn done(self, _outcome: &Outcome<'_>, _buffers: Buffers) {
            match self {}
        }
    }

    type ChannelState = super::ChannelState<NoOp>;

    fn state() -> ChannelState {
        ChannelState::new(Arc::new(ChannelShared::new(0, 0, "/job:ps/replica:0/task:0".into(), "h:1".into(), None)))
    }

    #[test]
    fn back_off_grows_to_half_a_second_and_is_forgotten_on_success() {
        let mut s = state();
        let now = Instant::now();
        let wait = |s: &ChannelState| s.not_before.map_or(Duration::ZERO, |t| t - now);
        s.failed(now, 0);
        assert!(wait(&s) <= Duration::from_millis(25), "{:?}", wait(&s));
        for r in 0..40 {
            s.failed(now, r * 7919);
        }
        assert!(wait(&s) >= Duration::from_millis(375) && wait(&s) <= Duration::from_millis(625), "{:?}", wait(&s));
        s.succeeded();
        assert!(s.not_before.is_none());
        s.failed(now, 0);
        assert!(wait(&s) <= Duration::from_millis(25));
    }

    #[test]
    fn the_log_hears_of_an_unreachable_peer_only_while_somebody_waits() {
        let mut s = state();
        let now = Instant::now();
        assert!(!s.should_tell(now, true), "too soon");
        assert!(!s.should_tell(now + PATIENCE, false), "nobody waits");
        assert!(s.should_tell(now + PATIENCE, true));
        assert!(!s.should_tell(now + PATIENCE * 2, true), "it was said");
        assert!(s.should_tell(now + PATIENCE + REMINDER, true));
        s.succeeded();
        assert!(!s.should_tell(now + PATIENCE + REMINDER, true), "a new outage");
    }
}
