//! Channels: the caller's handle, and the shard's state: queue, address look-up, connecting and back-off.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::api::PendingOp;
use crate::api::{Host, Op};
use crate::command::{Command, NewCall, NewRecv};
use crate::config::DataAddress;
use crate::shared::Shared;
use starwire_net::transport::{SocketAddress, backoff};
use starwire_protocol::{Failure, Outcome, code, digest};

/// Requests may wait for a peer until their deadline (TensorFlow waits for tasks that start later). After this time,
/// the log names the peer and the reason …
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
    pub(crate) data: DataAddress,
    next_id: AtomicU64,
}

impl ChannelShared {
    pub fn new(number: u32, shard: usize, task: String, grpc_address: String, data: DataAddress) -> Self {
        Self { number, shard, task, grpc_address, data, next_id: AtomicU64::new(1) }
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

    /// A reply arrived that carries this many tensors as one.
    pub fn count_fused(&self, tensors: u64) {
        self.shared.metrics.count(|cells| {
            cells.fused_messages_received.add(1);
            cells.fused_tensors_received.add(tensors);
        });
    }

    pub fn call(&self, mut call: NewCall<H::Op>) -> u64 {
        let id = self.next_id();
        if self.shared.config.secret.is_some() && u16::try_from(call.method).is_ok_and(digest::has_digest) {
            call.meta.extend(call.payload.iter().filter_map(|payload| digest::digest(payload.parts())).flatten());
        }
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

    fn send(&self, command: Command<H>) {
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
    /// Notes the start and the kind of the request for the metrics.
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
    /// Nothing is waiting.
    Idle,
    /// The name service is looking up the peer's host.
    LookingUp,
    /// One candidate is being tried; `conn` is its connection. `rest` are tried next.
    Connecting {
        conn: u64,
        rest: VecDeque<SocketAddress>,
    },
    Ready {
        conn: u64,
    },
    /// Requests wait, but the next attempt starts at `not_before`.
    BackingOff,
}

/// A shard's side of a channel.
pub struct ChannelState<O: Op> {
    pub shared: Arc<ChannelShared>,
    pub state: State,
    pub waiting: VecDeque<Waiting<O>>,
    /// Number of the connection attempt; answers to older ones are ignored.
    pub attempt: u32,
    /// When the current attempt is abandoned.
    pub attempt_ends: Option<Instant>,
    /// No new attempt before this.
    pub not_before: Option<Instant>,
    /// When requests began to wait for a connection.
    pub wanted_since: Option<Instant>,
    failures: u32,
    /// When the first of these failures was, and when they were last logged.
    unreachable_since: Option<Instant>,
    told: Option<Instant>,
    /// The peer's incarnation on the last connection.
    pub incarnation: Option<u64>,
    /// RDMA failed with this peer: it is not tried again before this.
    pub no_pairs_before: Option<Instant>,
    /// The errors of this attempt's candidates.
    pub errors: Vec<String>,
}

impl<O: Op> ChannelState<O> {
    pub fn new(shared: Arc<ChannelShared>) -> Self {
        Self {
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
        self.errors.clear();
    }

    /// Counts a failed attempt and sets the time of the next.
    pub fn failed(&mut self, now: Instant, random: u64) {
        self.not_before = Some(now + backoff::pause(self.failures, random));
        self.failures = self.failures.saturating_add(1);
        self.attempt_ends = None;
    }

    /// The error of requests that waited for a failed attempt. A peer that is down is told in gRPC's words, by which
    /// programs recognise that.
    pub fn unreachable(&self, failure: &Failure) -> String {
        let (task, address) = (&self.shared.task, &self.shared.grpc_address);
        let words = if failure.code == code::UNAVAILABLE { "failed to connect to all addresses: " } else { "" };
        format!(
            "starwire: cannot reach {task} ({address}): {words}{}{}",
            failure.message,
            self.shared.data.remark(address)
        )
    }

    /// Whether to log now that requests wait for an unreachable peer: soon, and then once a minute.
    pub fn should_tell(&mut self, now: Instant, somebody_waits: bool) -> bool {
        let since = *self.unreachable_since.get_or_insert(now);
        let due = self.told.map_or(since + PATIENCE, |at| at + REMINDER);
        if !somebody_waits || now < due {
            return false;
        }
        self.told = Some(now);
        true
    }

    /// Ends waiting requests: all of them, or only those that do not wait for another attempt. Returns how many.
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

    /// Ends requests whose deadline has passed. Returns how many.
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
    use crate::api::Buffers;

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
        let data = DataAddress::Derived("h:1".parse().unwrap());
        ChannelState::new(Arc::new(ChannelShared::new(0, 0, "/job:ps/replica:0/task:0".into(), "h:1".into(), data)))
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
