//! One channel: its attempts to connect, and the requests that wait for them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use std::vec::IntoIter;

use super::{Do, Peer, Stage, Waiting, is_guess};
use crate::api::Level;
use crate::config::HostPort;
use starwire_net::transport::{SocketAddress, backoff};
use starwire_protocol::{Failure, code};

/// The longest look-up and the longest attempt at one address, so that a peer that is down is noticed. Requests that
/// wait for the peer get more attempts.
const LONGEST: Duration = Duration::from_secs(10);
/// Requests may wait for a peer until their deadline (TensorFlow waits for tasks that start later). After this time,
/// the log names the peer and the reason …
pub const PATIENCE: Duration = Duration::from_secs(5);
/// … and again.
pub const REMINDER: Duration = Duration::from_secs(60);
/// A peer that was connected before gets so many more attempts at once if a connection is cut during its handshake:
/// somebody is there, and requests that began a moment earlier are sent again.
const CUTS: u32 = 3;
/// A peer that moves more often than this before it answers is in two places.
const MOST_REDIRECTS: u32 = 4;
/// After RDMA failed with a peer, it is not tried again before this.
pub const SHUNNED: Duration = Duration::from_secs(60);

enum State {
    /// Nothing waits, or the next attempt starts at `not_before`.
    Idle,
    Resolving,
    /// One address is being tried, `rest` are tried next. `conn` is its connection, once that was begun.
    Connecting {
        conn: Option<u64>,
        address: SocketAddress,
        rest: IntoIter<SocketAddress>,
    },
    Ready(u64),
}

pub struct Channel<R> {
    peer: Arc<Peer>,
    /// Of a look-up, and of an attempt at one address.
    limit: Duration,
    seed: u64,
    state: State,
    waiting: VecDeque<Waiting<R>>,
    actions: VecDeque<Do<R>>,
    /// The earliest wake-up that was asked for.
    wake_at: Option<Instant>,
    /// A look-up has not ended yet. It may take longer than an attempt, and the next one waits for it.
    is_looking_up: bool,
    /// When the look-up or the address is given up; `None` once that was done.
    until: Option<Instant>,
    /// When requests began to wait for a connection.
    wanted_since: Option<Instant>,
    outage: Outage,
    /// Where the peer has moved, and how often it has said so since the last connection.
    redirect: Option<HostPort>,
    redirects: u32,
    /// The peer's incarnation on the last connection.
    incarnation: Option<u64>,
    /// RDMA failed with this peer: it is not tried again before this.
    no_pairs_before: Option<Instant>,
    stopped: bool,
}

/// Failures since the last connection.
#[derive(Default)]
struct Outage {
    attempts: u32,
    /// Attempts that were cut during the handshake, and whether this one was.
    cuts: u32,
    is_cut: bool,
    /// When requests that wait are logged next.
    log_at: Option<Instant>,
    /// No new attempt before this.
    not_before: Option<Instant>,
    /// The error of the last attempt that has failed, and those of the current one's addresses.
    last_error: Option<String>,
    errors: Vec<String>,
}

impl<R> Channel<R> {
    pub fn new(peer: Arc<Peer>, connect_timeout: Duration, seed: u64) -> Self {
        Self {
            peer,
            limit: connect_timeout.min(LONGEST),
            seed,
            state: State::Idle,
            waiting: VecDeque::new(),
            actions: VecDeque::new(),
            wake_at: None,
            is_looking_up: false,
            until: None,
            wanted_since: None,
            outage: Outage::default(),
            redirect: None,
            redirects: 0,
            incarnation: None,
            no_pairs_before: None,
            stopped: false,
        }
    }

    pub fn peer(&self) -> &Arc<Peer> {
        &self.peer
    }

    /// Where the peer is looked up.
    pub fn address(&self) -> &HostPort {
        self.redirect.as_ref().unwrap_or(self.peer.data.address())
    }

    /// Returns the connection on which requests start at once. Then none waits.
    pub fn connection(&self) -> Option<u64> {
        match self.state {
            State::Ready(conn) => Some(conn),
            _ => None,
        }
    }

    /// The connection, even if it is not ready.
    pub fn any_connection(&self) -> Option<u64> {
        match self.state {
            State::Ready(conn) => Some(conn),
            State::Connecting { conn, .. } => conn,
            _ => None,
        }
    }

    pub fn poll(&mut self) -> Option<Do<R>> {
        self.actions.pop_front()
    }

    /// Room for requests, actions and errors.
    #[cfg(test)]
    pub fn room(&self) -> usize {
        self.waiting.capacity() + self.actions.len() + self.outage.errors.capacity()
    }

    pub fn submit(&mut self, request: Waiting<R>, now: Instant) {
        if let Some(deadline) = request.deadline {
            self.wake(deadline);
        }
        self.waiting.push_back(request);
        self.proceed(now);
    }

    /// Does what the requests that wait need.
    fn proceed(&mut self, now: Instant) {
        if self.waiting.is_empty() {
            return;
        }
        match self.state {
            _ if self.stopped => self.end(code::UNAVAILABLE, "starwire: the server was stopped", |_| true),
            State::Ready(conn) => {
                let requests = std::mem::take(&mut self.waiting);
                self.actions.push_back(Do::Start(conn, requests));
            }
            State::Idle => match self.outage.not_before.filter(|at| *at > now) {
                Some(at) => self.wake(at),
                None => {
                    self.wanted_since.get_or_insert(now);
                    if !std::mem::replace(&mut self.is_looking_up, true) {
                        self.actions.push_back(Do::Resolve);
                    }
                    self.enter(State::Resolving, now);
                }
            },
            State::Resolving | State::Connecting { .. } => {}
        }
    }

    /// Begins a look-up or an attempt at an address, which may take no longer than the limit.
    fn enter(&mut self, state: State, now: Instant) {
        self.state = state;
        self.until = Some(now + self.limit);
        self.wake(now + self.limit);
    }

    /// The look-up has ended.
    pub fn resolved(&mut self, result: Result<Vec<SocketAddress>, Failure>, now: Instant) {
        self.is_looking_up = false;
        if !matches!(self.state, State::Resolving) {
            return;
        }
        match result {
            Ok(found) => self.try_next(found.into_iter(), now),
            Err(failure) => self.fail(failure, now),
        }
    }

    fn try_next(&mut self, mut rest: IntoIter<SocketAddress>, now: Instant) {
        match rest.next() {
            Some(address) => self.connect(address, rest, now),
            None => self.fail(unavailable(self.outage.errors.join("; ")), now),
        }
    }

    fn connect(&mut self, address: SocketAddress, rest: IntoIter<SocketAddress>, now: Instant) {
        let with_pairs = self.no_pairs_before.is_none_or(|until| until <= now);
        self.actions.push_back(Do::Connect { address: address.clone(), with_pairs });
        self.enter(State::Connecting { conn: None, address, rest }, now);
    }

    /// A connection was begun, or cannot be.
    pub fn connecting(&mut self, result: Result<u64, String>, now: Instant) {
        let State::Connecting { conn, .. } = &mut self.state else { return };
        match result {
            Ok(key) => *conn = Some(key),
            Err(message) => self.address_failed(Stage::Connect, unavailable(message), now),
        }
    }

    /// The handshake is done.
    pub fn ready(&mut self, conn: u64, incarnation: u64, now: Instant) {
        if !matches!(self.state, State::Connecting { conn: Some(own), .. } if own == conn) {
            return;
        }
        self.state = State::Ready(conn);
        self.outage = Outage::default();
        self.redirects = 0;
        let after = self.wanted_since.take().map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        let before = self.incarnation.replace(incarnation);
        if before.is_some_and(|old| old != incarnation) {
            let line = format!("starwire: {} was restarted; connected to its new incarnation", self.peer.task);
            self.actions.push_back(Do::Log(Level::Info, line));
        }
        self.actions.push_back(Do::Connected { conn, after, is_new: before != Some(incarnation) });
        self.proceed(now);
    }

    /// Another process has the peer's task, at this address.
    pub fn moved(&mut self, conn: u64, to: &str, now: Instant) {
        if !matches!(self.state, State::Connecting { conn: Some(own), .. } if own == conn) {
            return;
        }
        self.state = State::Idle;
        self.redirects += 1;
        match to.parse() {
            Ok(address) if self.redirects <= MOST_REDIRECTS => {
                let line = format!("starwire: {} has moved to {to}", self.peer.task);
                self.actions.push_back(Do::Log(Level::Info, line));
                self.redirect = Some(address);
                self.proceed(now);
            }
            Ok(_) => {
                self.redirects = 0;
                self.fail(unavailable(format!("it has moved again and again, at last to {to}")), now);
            }
            Err(error) => self.fail(unavailable(format!("it has moved to {to:?}: {error}")), now),
        }
    }

    /// The peer takes no new requests on this connection.
    pub fn goodbye(&mut self, conn: u64) {
        if self.connection() == Some(conn) {
            self.state = State::Idle;
        }
    }

    /// A connection was closed.
    pub fn lost(&mut self, conn: u64, stage: Stage, failure: Failure, now: Instant) {
        self.goodbye(conn);
        if matches!(self.state, State::Connecting { conn: Some(own), .. } if own == conn) {
            self.address_failed(stage, failure, now);
        }
    }

    fn address_failed(&mut self, stage: Stage, mut failure: Failure, now: Instant) {
        let State::Connecting { address, rest, .. } = std::mem::replace(&mut self.state, State::Idle) else { return };
        if stage == Stage::Migration {
            starwire_marks::mark!("a connection is made again without RDMA");
            self.shun_pairs(&failure.message, now);
            return self.connect(address, rest, now);
        }
        // Another server may have the unix socket: the next address is tried, whatever it said.
        if failure.code != code::UNAVAILABLE && !is_guess(&address) {
            return self.fail(failure, now);
        }
        self.outage.is_cut = stage == Stage::Handshake && failure.code == code::UNAVAILABLE && self.until.is_some();
        if stage == Stage::Connect || self.until.is_none() {
            failure.message = format!("{address}: {}", failure.message);
        }
        // That there is no such socket is no news.
        if stage != Stage::Connect || !is_guess(&address) {
            self.outage.errors.push(failure.message);
        }
        self.try_next(rest, now);
    }

    /// The attempt has failed. Requests that do not wait end; the others get another attempt, unless that cannot help.
    fn fail(&mut self, failure: Failure, now: Instant) {
        self.state = State::Idle;
        // The next attempt begins where the ClusterSpec says: whoever is there may know better.
        self.redirect = None;
        self.actions.push_back(Do::CountFailedAttempt);
        // A peer that is down is told in gRPC's words, by which programs recognise that.
        let words = if failure.code == code::UNAVAILABLE { "failed to connect to all addresses: " } else { "" };
        let Peer { task, grpc_address, data, .. } = &*self.peer;
        let remark = data.remark(grpc_address);
        let message = format!("starwire: cannot reach {task} ({grpc_address}): {words}{}{remark}", failure.message);
        // A wrong peer stays wrong, but a peer that is down may come up.
        let may_help = matches!(failure.code, code::UNAVAILABLE | code::DEADLINE_EXCEEDED | code::CANCELLED);
        let outage = &mut self.outage;
        outage.cuts += u32::from(outage.is_cut);
        let is_there = std::mem::take(&mut outage.is_cut) && self.incarnation.is_some() && outage.cuts <= CUTS;
        self.end(failure.code, &message, |waiting| !(may_help && (waiting.wait_for_ready || is_there)));
        let outage = &mut self.outage;
        // Channels must not try in step.
        let random = self.seed.wrapping_mul(u64::from(outage.attempts) + 1) >> 32;
        outage.not_before = Some(now + backoff::pause(outage.attempts, random));
        outage.attempts = outage.attempts.saturating_add(1);
        outage.errors = Vec::new();
        outage.last_error = Some(failure.message);
        if *outage.log_at.get_or_insert(now + PATIENCE) <= now && !self.waiting.is_empty() {
            outage.log_at = Some(now + REMINDER);
            let line = format!("{message}; {} requests are waiting, retrying", self.waiting.len());
            self.actions.push_back(Do::Log(Level::Warning, line));
        }
        self.proceed(now);
    }

    /// The time of a [`Do::WakeAt`] has come.
    pub fn tick(&mut self, now: Instant) {
        self.wake_at = self.wake_at.filter(|at| *at > now);
        let is_late = |waiting: &Waiting<R>| waiting.deadline.is_some_and(|at| at <= now);
        if self.waiting.iter().any(is_late) {
            let (task, Outage { errors, last_error, .. }) = (&self.peer.task, &self.outage);
            let error = errors.last().or(last_error.as_ref()).map_or("no attempt has failed yet", String::as_str);
            let message = format!("starwire: deadline exceeded while waiting for a connection to {task} ({error})");
            self.end(code::DEADLINE_EXCEEDED, &message, is_late);
        }
        if self.until.is_some_and(|at| at <= now) {
            self.until = None;
            match self.state {
                State::Resolving => self.fail(unavailable("timed out looking up its host".to_owned()), now),
                State::Connecting { conn: Some(conn), .. } => {
                    self.actions.push_back(Do::Close(conn, "timed out connecting"));
                }
                _ => {}
            }
        }
        self.proceed(now);
        if let Some(at) = self.waiting.iter().filter_map(|waiting| waiting.deadline).chain(self.until).min() {
            self.wake(at);
        }
    }

    /// Asks for a wake-up, unless there will be an earlier one.
    fn wake(&mut self, at: Instant) {
        if self.wake_at.is_none_or(|earlier| at < earlier) {
            self.wake_at = Some(at);
            self.actions.push_back(Do::WakeAt(at));
        }
    }

    /// Ends a request that waits.
    pub fn cancel(&mut self, id: u64, code: i32, message: &str) {
        self.end(code, message, |waiting| waiting.id == id);
    }

    fn end(&mut self, code: i32, message: &str, which: impl Fn(&Waiting<R>) -> bool) {
        let (requests, waiting): (VecDeque<_>, _) = std::mem::take(&mut self.waiting).into_iter().partition(which);
        self.waiting = waiting;
        if self.waiting.is_empty() && matches!(self.state, State::Idle) {
            self.wanted_since = None;
        }
        if !requests.is_empty() {
            self.actions.push_back(Do::End { requests, code, message: message.to_owned() });
        }
    }

    /// RDMA does not work with this peer: it is not tried for a while.
    pub fn shun_pairs(&mut self, why: &str, now: Instant) {
        self.actions.push_back(Do::CountFallback);
        if self.no_pairs_before.replace(now + SHUNNED).is_none() {
            let line = format!("starwire: no RDMA to {}: {why}; using TCP", self.peer.task);
            self.actions.push_back(Do::Log(Level::Warning, line));
        }
    }

    pub fn pairs_work(&mut self) {
        self.no_pairs_before = None;
    }

    /// Ends all requests that wait, and takes no more.
    pub fn stop(&mut self, now: Instant) {
        self.stopped = true;
        if self.connection().is_none() {
            self.state = State::Idle;
        }
        self.proceed(now);
    }
}

fn unavailable(message: String) -> Failure {
    Failure { code: code::UNAVAILABLE, message }
}
