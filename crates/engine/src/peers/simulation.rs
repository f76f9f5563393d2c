//! Random requests, faults and answers for a channel, in virtual time.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Channel, Do, Peer, Stage, Waiting};
use crate::config::DataAddress;
use crate::random::Random;
use starwire_net::transport::SocketAddress;
use starwire_protocol::{Failure, code};

const LIMIT: Duration = Duration::from_secs(2);
/// The longest pause between two attempts.
const PAUSE: Duration = Duration::from_millis(625);
/// Answers that come take no longer.
const LATENCY: Duration = Duration::from_millis(500);
/// Of a look-up that hangs: several attempts.
const LONG_LOOKUP: Duration = Duration::from_secs(9);

enum Event {
    Resolved(Result<Vec<SocketAddress>, Failure>),
    Ready(u64),
    Lost(u64, Stage, Failure),
    Wake,
}

/// A request that has not ended.
struct Request {
    /// The channel has another reference while the request waits.
    token: Rc<()>,
    deadline: Option<Instant>,
    wait_for_ready: bool,
    is_cancelled: bool,
    conn: Option<u64>,
}

/// What the channel is known to do.
#[derive(Default)]
struct Task {
    is_looking_up: bool,
    /// The connection that is being made, and when it began.
    candidate: Option<(u64, Instant)>,
    is_closing: bool,
    /// The addresses to try, and the last one.
    rest: VecDeque<SocketAddress>,
    last: Option<SocketAddress>,
    /// RDMA has failed: the last address is tried again.
    again: bool,
    ready: Option<u64>,
    incarnation: u64,
    met: Option<u64>,
    failures: u32,
    failed_at: Option<Instant>,
}

#[derive(Default, Debug)]
struct Counts {
    started: u64,
    expired: u64,
    cancelled: u64,
    failed: u64,
    given_up: u64,
    restarts: u64,
    fallbacks: u64,
}

struct World {
    random: Random,
    now: Instant,
    channel: Channel<Rc<()>>,
    task: Task,
    requests: BTreeMap<u64, Request>,
    events: BTreeMap<(Instant, u64), Event>,
    next: u64,
    is_faulty: bool,
    is_stopped: bool,
    counts: Counts,
}

fn failure(code: i32) -> Failure {
    Failure { code, message: "a fault".into() }
}

impl World {
    fn new(seed: u64) -> Self {
        let data = DataAddress::Derived("h:1".parse().unwrap());
        let peer = Peer { task: "task".into(), grpc_address: "h:1".into(), data, has_joined: false };
        let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
        Self {
            channel: Channel::new(Arc::new(peer), LIMIT, random.below(u64::MAX)),
            random,
            now: Instant::now(),
            task: Task::default(),
            requests: BTreeMap::new(),
            events: BTreeMap::new(),
            next: 0,
            is_faulty: true,
            is_stopped: false,
            counts: Counts::default(),
        }
    }

    fn below(&mut self, n: u64) -> u64 {
        self.random.below(n)
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn at(&mut self, at: Instant, event: Event) {
        let key = (at.max(self.now), self.number());
        self.events.insert(key, event);
    }

    fn soon(&mut self, event: Event) {
        let after = Duration::from_millis(self.below(LATENCY.as_millis() as u64));
        self.at(self.now + after, event);
    }

    fn tell(&mut self, input: impl FnOnce(&mut Channel<Rc<()>>)) {
        input(&mut self.channel);
        while let Some(action) = self.channel.poll() {
            self.act(action);
        }
        self.check();
    }

    fn submits(&mut self, deadline: Option<Instant>, wait_for_ready: bool) {
        let (id, token, now) = (self.number(), Rc::new(()), self.now);
        let conn = self.channel.connection().filter(|_| !self.is_stopped);
        assert!(self.is_stopped || conn == self.task.ready);
        let request = Request { token: token.clone(), deadline, wait_for_ready, is_cancelled: false, conn };
        self.requests.insert(id, request);
        if conn.is_none() {
            let waiting = Waiting { id, request: token, deadline, wait_for_ready };
            self.tell(|channel| channel.submit(waiting, now));
        }
    }

    fn act(&mut self, action: Do<Rc<()>>) {
        let now = self.now;
        match action {
            Do::Resolve => self.resolves(),
            Do::Connect { address, with_pairs } => {
                let result = self.connects(address, with_pairs);
                self.channel.connecting(result, now);
            }
            Do::Close(conn, why) => {
                let task = &mut self.task;
                let (own, began) = task.candidate.expect("a connection that is being made");
                assert!(own == conn && now >= began + LIMIT && !std::mem::replace(&mut task.is_closing, true));
                self.events.retain(|_, event| !matches!(event, Event::Ready(c) | Event::Lost(c, ..) if *c == conn));
                let stage = if self.below(2) == 0 { Stage::Connect } else { Stage::Handshake };
                self.soon(Event::Lost(conn, stage, Failure { code: code::UNAVAILABLE, message: why.into() }));
                self.counts.given_up += 1;
            }
            Do::Connected { conn, is_new, .. } => {
                let task = &mut self.task;
                let (before, incarnation) = (task.met, task.incarnation);
                let is_restarted = before.is_some_and(|old| old != incarnation);
                assert!(task.ready == Some(conn) && is_new == (before != Some(incarnation)));
                *task = Task { met: Some(incarnation), incarnation, ready: task.ready, ..Task::default() };
                self.counts.restarts += u64::from(is_restarted);
            }
            Do::Start(conn, requests) => {
                assert_eq!(self.task.ready, Some(conn));
                for waiting in requests {
                    let request = self.requests.get_mut(&waiting.id).expect("it has ended");
                    assert!(request.conn.replace(conn).is_none(), "started twice");
                    self.counts.started += 1;
                }
            }
            Do::End { requests, code, message } => {
                for waiting in requests {
                    let request = self.requests.remove(&waiting.id).expect("ended twice");
                    assert!(request.conn.is_none());
                    self.ended(&request, code, &message);
                }
            }
            Do::WakeAt(at) => self.at(at, Event::Wake),
            Do::Log(..) => {}
            Do::CountFailedAttempt => {
                let Task { met, incarnation, failures, is_looking_up, .. } = self.task;
                let failed_at = Some(now);
                let failures = failures + 1;
                self.task = Task { met, incarnation, failures, failed_at, is_looking_up, ..Task::default() };
                self.counts.failed += 1;
            }
            Do::CountFallback => self.counts.fallbacks += 1,
        }
    }

    fn ended(&mut self, request: &Request, code: i32, message: &str) {
        match code {
            code::DEADLINE_EXCEEDED => {
                assert!(request.deadline.is_some_and(|at| at <= self.now), "too soon");
                let has_failed = self.task.failures > 0;
                assert!(!has_failed || !message.contains("no attempt has failed yet"), "{message}");
                self.counts.expired += 1;
            }
            code::CANCELLED => {
                assert!(request.is_cancelled);
                self.counts.cancelled += 1;
            }
            code::UNAVAILABLE => assert!(!request.wait_for_ready || self.is_stopped, "{message}"),
            _ => assert_eq!(code, code::FAILED_PRECONDITION),
        }
    }

    fn resolves(&mut self) {
        let now = self.now;
        let task = &mut self.task;
        assert!(!std::mem::replace(&mut task.is_looking_up, true) && task.candidate.is_none() && task.ready.is_none());
        if let Some(at) = task.failed_at {
            let least = Duration::from_millis(500.min(20 << (task.failures - 1).min(5)) * 3 / 4);
            assert!(now >= at + least, "{:?} after {} failures", now - at, task.failures);
        }
        let hosts = 1 + self.below(4);
        let found = (0..hosts).map(|host| match self.below(4) {
            0 => SocketAddress::Unix(format!("@{host}").into()),
            _ => SocketAddress::Inet(([10, 0, 0, host as u8], 1).into()),
        });
        let found = found.collect();
        match self.below(8) {
            0 if self.is_faulty => self.at(now + LONG_LOOKUP, Event::Resolved(Ok(found))),
            1 if self.is_faulty => self.at(now + LIMIT + LATENCY, Event::Resolved(Ok(found))),
            2 if self.is_faulty => self.soon(Event::Resolved(Err(failure(code::UNAVAILABLE)))),
            _ => self.soon(Event::Resolved(Ok(found))),
        }
    }

    fn connects(&mut self, address: SocketAddress, with_pairs: bool) -> Result<u64, String> {
        let (now, conn) = (self.now, self.number());
        let task = &mut self.task;
        let next = if std::mem::take(&mut task.again) { task.last.clone() } else { task.rest.pop_front() };
        assert_eq!(next.as_ref(), Some(&address), "in order");
        assert!(!task.is_looking_up && task.candidate.is_none() && task.ready.is_none());
        task.last = Some(address);
        let what = if self.is_faulty { self.below(12) } else { 12 };
        if what == 0 {
            return Err("a fault".into());
        }
        self.task.candidate = Some((conn, now));
        self.task.is_closing = false;
        match what {
            1 | 2 => self.soon(Event::Lost(conn, Stage::Connect, failure(code::UNAVAILABLE))),
            3 => self.soon(Event::Lost(conn, Stage::Handshake, failure(code::UNAVAILABLE))),
            4 => self.soon(Event::Lost(conn, Stage::Handshake, failure(code::FAILED_PRECONDITION))),
            5 if with_pairs => self.soon(Event::Lost(conn, Stage::Migration, failure(code::UNAVAILABLE))),
            6 | 7 => {}
            _ => self.soon(Event::Ready(conn)),
        }
        Ok(conn)
    }

    /// The next event happens.
    fn happens(&mut self) {
        let Some(((at, _), event)) = self.events.pop_first() else { return };
        self.now = at;
        match event {
            Event::Wake => self.tell(|channel| channel.tick(at)),
            Event::Resolved(result) => {
                let task = &mut self.task;
                task.is_looking_up = false;
                task.rest = result.iter().flatten().cloned().collect();
                self.tell(|channel| channel.resolved(result, at));
            }
            Event::Ready(conn) => {
                let is_restarted = self.below(4) == 0;
                let task = &mut self.task;
                task.incarnation += u64::from(is_restarted);
                let incarnation = task.incarnation;
                task.ready = task.candidate.take().map(|(conn, _)| conn);
                self.tell(|channel| channel.ready(conn, incarnation, at));
            }
            Event::Lost(conn, stage, failure) => {
                let task = &mut self.task;
                if task.candidate.is_some_and(|(own, _)| own == conn) {
                    task.candidate = None;
                    task.again = stage == Stage::Migration;
                }
                self.loses(conn, stage, failure);
            }
        }
    }

    fn loses(&mut self, conn: u64, stage: Stage, failure: Failure) {
        let now = self.now;
        self.requests.retain(|_, request| request.conn != Some(conn));
        self.tell(|channel| channel.lost(conn, stage, failure, now));
    }

    /// The owner of a request, or a peer, does something.
    fn acts(&mut self) {
        let what = self.below(10);
        match what {
            0..4 => {
                let deadline = Duration::from_millis(self.below(5_000));
                let deadline = (self.below(2) == 0).then(|| self.now + deadline);
                let wait_for_ready = self.below(2) == 0;
                self.submits(deadline, wait_for_ready);
            }
            4 | 5 => {
                let at = self.below(self.requests.len().max(1) as u64) as usize;
                let Some((id, request)) = self.requests.iter_mut().nth(at) else { return };
                let (id, waits) = (*id, request.conn.is_none());
                request.is_cancelled = true;
                self.tell(|channel| channel.cancel(id, code::CANCELLED, "cancelled"));
                assert_eq!(self.requests.contains_key(&id), !waits, "a request that waits ends at once");
            }
            _ => {
                let Some(conn) = self.task.ready.take() else { return };
                if what < 8 {
                    self.tell(|channel| channel.goodbye(conn));
                    self.soon(Event::Lost(conn, Stage::Handshake, failure(code::UNAVAILABLE)));
                } else {
                    self.loses(conn, Stage::Handshake, failure(code::UNAVAILABLE));
                }
            }
        }
    }

    fn check(&self) {
        let wakes = |until: Instant| {
            let mut before = self.events.range(..=(until.max(self.now), u64::MAX));
            before.any(|(_, event)| matches!(event, Event::Wake))
        };
        for (id, request) in &self.requests {
            let is_kept = Rc::strong_count(&request.token) > 1;
            assert_eq!(is_kept, request.conn.is_none(), "{id} is forgotten, or kept after its start");
            if !is_kept {
                continue;
            }
            assert!(request.deadline.is_none_or(wakes), "{id} outlives its deadline");
            let task = &self.task;
            assert!(task.ready.is_none(), "{id} waits beside a connection");
            let is_moving = match (task.candidate, task.failed_at) {
                (Some(_), _) if task.is_closing => true,
                (Some((_, began)), _) => wakes(began + LIMIT),
                _ if task.is_looking_up => wakes(self.now + LIMIT),
                (_, Some(at)) => wakes(at + PAUSE),
                _ => false,
            };
            assert!(is_moving, "{id} waits for nothing");
        }
    }

    fn run(mut self) -> Counts {
        for _ in 0..1_000 {
            if self.below(3) == 0 { self.acts() } else { self.happens() }
        }
        self.is_faulty = false;
        if self.below(4) == 0 {
            self.stops();
        } else {
            self.recovers();
        }
        self.counts
    }

    /// Without faults, the channel connects soon.
    fn recovers(&mut self) {
        let due = self.now + LONG_LOOKUP + LIMIT + PAUSE + 4 * LATENCY;
        self.submits(None, true);
        while self.requests.values().any(|request| request.conn.is_none()) {
            self.happens();
            assert!(self.now <= due, "no connection");
        }
        assert_eq!(self.channel.room(), 0, "memory is kept");
    }

    fn stops(&mut self) {
        let now = self.now;
        self.is_stopped = true;
        self.tell(|channel| channel.stop(now));
        self.submits(None, true);
        assert!(self.requests.values().all(|request| request.conn.is_some()), "a request outlives the server");
        while !self.events.is_empty() {
            self.happens();
        }
    }
}

#[test]
fn random_requests_and_faults() {
    let mut all = Counts::default();
    for seed in 0..200 {
        let Counts { started, expired, cancelled, failed, given_up, restarts, fallbacks } = World::new(seed).run();
        all.started += started;
        all.expired += expired;
        all.cancelled += cancelled;
        all.failed += failed;
        all.given_up += given_up;
        all.restarts += restarts;
        all.fallbacks += fallbacks;
    }
    let Counts { started, expired, cancelled, failed, given_up, restarts, fallbacks } = all;
    let each = [started, expired, cancelled, failed, given_up, restarts, fallbacks];
    assert!(each.iter().all(|count| *count > 100), "{all:?}");
}
