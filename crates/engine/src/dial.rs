//! The client side of a shard: how a channel finds its peer and connects, and when waiting requests end.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::api::{Host, Level, Op};
use crate::channel::{State, Waiting, What};
use crate::command::{Command, NewCall, NewRecv};
use crate::config::HostPort;
use crate::conn::Role;
use crate::metrics;
use crate::shard::Shard;
use crate::whereabouts::is_final;
use starwire_net::reactor::topology::Topology;
use starwire_net::transport::{SocketAddress, tcp, unix};
use starwire_protocol::{Call, Connection, Failure, Outcome, Recv, code};

/// Longest attempt to connect, so that a peer that is down is noticed. Requests that wait for the peer get more
/// attempts.
const ATTEMPT: Duration = Duration::from_secs(10);
/// Channel numbers have 24 bits in a token.
pub const MAX_CHANNELS: u32 = 1 << 24;

/// Identifies an attempt in a question to the host or the name service.
pub fn token(shard: usize, channel: u32, attempt: u32) -> u64 {
    ((shard as u64) << 56) | (u64::from(channel % MAX_CHANNELS) << 32) | u64::from(attempt)
}

pub fn untoken(token: u64) -> (usize, u32, u32) {
    let [shard, channel @ .., _, _, _, _] = token.to_be_bytes();
    let [a, b, c] = channel;
    (usize::from(shard), u32::from_be_bytes([0, a, b, c]), (token & 0xffff_ffff) as u32)
}

impl<H: Host> Shard<H> {
    pub(crate) fn submit(&mut self, number: u32, mut waiting: Waiting<H::Op>, now: Instant) {
        waiting.what.stamp(now);
        let stopping = self.is_stopping();
        let Some(channel) = self.channels.get_mut(&number) else {
            return refuse(waiting, "starwire: no such channel");
        };
        if stopping {
            return refuse(waiting, "starwire: the server was stopped");
        }
        if let State::Ready { conn } = channel.state {
            self.start(conn, waiting, now);
            return self.deliver(conn, now);
        }
        let deadline = waiting.deadline;
        channel.waiting.push_back(waiting);
        if let Some(deadline) = deadline {
            self.arm_channel(number, deadline);
        }
        self.dial(number, now);
    }

    /// Hands a request to an open connection. The caller delivers the events.
    fn start(&mut self, key: u64, waiting: Waiting<H::Op>, now: Instant) {
        let Some(conn) = self.conns.get_mut(&key).filter(|c| c.closing.is_none()) else {
            // The connection is being closed; a new request shares its fate.
            return refuse(waiting, "starwire: the connection was just lost (Socket closed)");
        };
        let Waiting { id, what, deadline, .. } = waiting;
        match what {
            What::Recv(recv) => {
                self.dispatch.metrics.tensors_requested.add(1);
                let NewRecv { step, prefix, frame, iter, op } = recv;
                conn.proto.recv(now, Recv { id, step, prefix: &prefix, frame, iter, deadline, op });
            }
            What::Call(call) => {
                self.dispatch.metrics.calls_sent.add(1);
                let NewCall { method, meta, payload, op, .. } = call;
                match u16::try_from(method) {
                    Ok(method) if method > 0 => {
                        conn.proto.call(now, Call { id, method, meta, payload, deadline, op });
                    }
                    _ => op.done(&Outcome::Local {
                        code: code::INVALID_ARGUMENT,
                        message: "starwire: the method number is not in 1 to 65535",
                    }),
                }
            }
        }
        self.mark_dirty(key);
        if deadline.is_some() {
            self.arm(key);
        }
    }

    pub(crate) fn cancel(&mut self, number: u32, id: u64, code: i32, message: &str, now: Instant) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        if channel.cancel_waiting(id, code, message) {
            return self.dispatch.note();
        }
        if let State::Ready { conn: key } = channel.state {
            if let Some(conn) = self.conns.get_mut(&key) {
                self.dispatch.metrics.cancels_sent.add(1);
                conn.proto.cancel(now, id, code, message);
                self.mark_dirty(key);
                self.deliver(key, now);
            }
        }
    }

    /// Connects a channel that is needed.
    pub(crate) fn dial(&mut self, number: u32, now: Instant) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        if !matches!(channel.state, State::Idle | State::BackingOff) {
            return;
        }
        if let Some(at) = channel.not_before.filter(|at| *at > now) {
            channel.state = State::BackingOff;
            return self.arm_channel(number, at);
        }
        channel.attempt = channel.attempt.wrapping_add(1);
        channel.wanted_since.get_or_insert(now);
        channel.errors.clear();
        channel.state = State::LookingUp;
        let ends = now + self.shared.config.connect_timeout.min(ATTEMPT);
        channel.attempt_ends = Some(ends);
        let attempt = channel.attempt;
        self.arm_channel(number, ends);
        self.seek(number, attempt, now);
    }

    /// Resolves names to addresses, on a separate thread, because name services may block.
    pub(crate) fn look_up(
        &mut self,
        number: u32,
        attempt: u32,
        mut first: VecDeque<SocketAddress>,
        targets: Vec<HostPort>,
        now: Instant,
    ) {
        let literals: Vec<_> = targets.iter().map_while(literal).collect();
        if literals.len() == targets.len() {
            first.extend(literals.into_iter().map(SocketAddress::from));
            return self.connect_first(number, first, now);
        }
        let names = targets.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        let (shared, shard) = (self.shared.clone(), self.index);
        let thread = std::thread::Builder::new().name("starwire-names".into()).spawn(move || {
            // Keep off the CPU of a pinned reactor; a failure only costs time.
            let _ = shared.topology.as_ref().map(Topology::unpin_current_thread);
            let mut errors = Vec::new();
            for target in &targets {
                match target.resolve() {
                    Ok(found) => first.extend(found.into_iter().map(SocketAddress::from)),
                    Err(error) => errors.push(format!("cannot look up {}: {error}", target.host)),
                }
            }
            let result = if first.is_empty() { Err(errors.join("; ")) } else { Ok(first) };
            shared.send(shard, Command::Addresses { channel: number, attempt, result });
        });
        if let Err(error) = thread {
            let message = format!("cannot start a thread to look up {names}: {error}");
            self.attempt_failed(number, code::RESOURCE_EXHAUSTED, &message, now);
        }
    }

    pub(crate) fn addresses(
        &mut self,
        number: u32,
        attempt: u32,
        result: Result<VecDeque<SocketAddress>, String>,
        now: Instant,
    ) {
        if !self.is_current(number, attempt) {
            return;
        }
        match result {
            Ok(found) => self.connect_first(number, found, now),
            Err(message) => self.attempt_failed(number, code::UNAVAILABLE, &message, now),
        }
    }

    fn is_current(&self, number: u32, attempt: u32) -> bool {
        self.channels.get(&number).is_some_and(|c| c.attempt == attempt && matches!(c.state, State::LookingUp))
    }

    fn connect_first(&mut self, number: u32, found: VecDeque<SocketAddress>, now: Instant) {
        let mapped = self.channels.get(&number).is_some_and(|channel| channel.shared.mapped.is_some());
        let all = self.with_short_ways(found, mapped);
        self.connect_next(number, all, now);
    }

    fn connect_next(&mut self, number: u32, mut rest: VecDeque<SocketAddress>, now: Instant) {
        while let Some(address) = rest.pop_front() {
            let name = address.to_string();
            match self.connect(number, &address, now) {
                Ok(conn) => {
                    if let Some(channel) = self.channels.get_mut(&number) {
                        channel.state = State::Connecting { conn, rest };
                    }
                    return;
                }
                Err(_) if self.is_guess(&address) => {}
                Err(error) => {
                    if let Some(channel) = self.channels.get_mut(&number) {
                        channel.errors.push(format!("{name}: {error}"));
                    }
                }
            }
        }
        let message = self.channels.get(&number).map_or_else(String::new, |c| c.errors.join("; "));
        self.attempt_failed(number, code::UNAVAILABLE, &message, now);
    }

    fn connect(&mut self, number: u32, address: &SocketAddress, now: Instant) -> Result<u64, String> {
        let channel = self.channels.get(&number).ok_or("there is no such channel")?;
        let (task, expected) = (channel.shared.task.clone(), channel.expected.as_ref().map(|e| e.task.clone()));
        let (fd, guard): (OwnedFd, Option<OwnedFd>) = match address {
            SocketAddress::Inet(inet) => {
                (tcp::socket(*inet, &self.shared.tcp_options()).map_err(|e| e.to_string())?, None)
            }
            SocketAddress::Unix(_) => {
                let fd = unix::socket().map_err(|e| e.to_string())?;
                let guard = fd.try_clone().map_err(|e| e.to_string())?;
                (fd, Some(guard))
            }
        };
        let mut settings = self.shared.settings(expected);
        let offered_pairs = matches!(address, SocketAddress::Inet(_)) && {
            let shunned = self.channels.get(&number).and_then(|c| c.no_pairs_before);
            self.offer_pairs(&mut settings, shunned.is_none_or(|until| until <= now))
        };
        if guard.is_some() {
            self.offer_loans(&mut settings);
        }
        let session = self.session_to(address)?.map(Box::new);
        let proto = Connection::client(settings, now);
        let token = self.driver.register(fd).map_err(|e| e.to_string())?;
        let key = self.add_conn(token, Role::Client { channel: number }, proto, format!("{task} at {address}"));
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.guard = guard;
            conn.tls = session;
            conn.offered_pairs = offered_pairs;
            conn.address = Some(address.clone());
        }
        if let Err(error) = self.driver.connect(token, address) {
            self.conns.remove(&key);
            self.driver.close(token);
            return Err(error.to_string());
        }
        self.arm(key);
        Ok(key)
    }

    pub(crate) fn connected(&mut self, key: u64, result: std::io::Result<()>) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.closing.is_some() {
            return;
        }
        if let Err(error) = result {
            // The name is "task at address"; the operator needs to know which of a task's addresses it was.
            let address = conn.name.rsplit_once(" at ").map_or(conn.name.as_str(), |(_, address)| address);
            let message = format!("{address}: {error}");
            return self.lose(key, code::UNAVAILABLE, message);
        }
        // A local peer must run as the same user (or root) before it receives anything.
        if let Some(guard) = conn.guard.take() {
            match unix::check_peer(guard.as_fd()) {
                Ok(peer) => self.met_local_peer(key, peer.pid),
                Err(error) => return self.lose(key, code::UNAVAILABLE, error.to_string()),
            }
        }
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.connected = true;
        conn.entry.set_state(metrics::State::Handshake);
        self.mark_dirty(key);
        self.arm(key);
        self.receive_on(key);
    }

    pub(crate) fn client_ready(&mut self, number: u32, key: u64, now: Instant) {
        let Some(peer) = self.conns.get(&key).and_then(|c| c.peer.as_ref()) else { return };
        let (own_name, incarnation) = (peer.task.clone(), peer.incarnation);
        let Some(channel) = self.channels.get_mut(&number) else { return };
        channel.succeeded();
        channel.state = State::Ready { conn: key };
        if let Some(since) = channel.wanted_since.take() {
            self.dispatch.metrics.connect_time.record(now.saturating_duration_since(since));
        }
        let before = channel.incarnation.replace(incarnation);
        let waiting = std::mem::take(&mut channel.waiting);
        if before.is_some_and(|old| old != incarnation) {
            let line = format!("starwire: {} was restarted; connected to its new incarnation", channel.shared.task);
            self.shared.host.log(Level::Info, &line);
        }
        if before != Some(incarnation) {
            self.note_name(number, &own_name);
        }
        for w in waiting {
            self.start(key, w, now);
        }
    }

    /// The peer will answer open requests, but takes no new ones on this connection.
    pub(crate) fn said_goodbye(&mut self, key: u64, reason: String) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.goodbye = Some(reason);
        let Role::Client { channel } = &conn.role else { return };
        if let Some(channel) = self.channels.get_mut(channel) {
            if matches!(channel.state, State::Ready { conn } if conn == key) {
                channel.state = State::Idle;
            }
        }
    }

    /// The address at least belongs to a server of this cluster.
    pub(crate) fn refused_by_peer(&mut self, key: u64) {
        let Some(Role::Client { channel }) = self.conns.get(&key).map(|c| &c.role) else { return };
        if let Some(channel) = self.channels.get_mut(channel) {
            channel.was_refused = true;
        }
    }

    /// A client connection ended, or never opened.
    pub(crate) fn lost_client(
        &mut self,
        number: u32,
        key: u64,
        was_ready: bool,
        moving: Option<SocketAddress>,
        failure: Failure,
        now: Instant,
    ) {
        let stopping = self.is_stopping();
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let state = std::mem::replace(&mut channel.state, State::Idle);
        match state {
            State::Ready { conn } if conn == key => {
                if !stopping && !channel.waiting.is_empty() {
                    self.dial(number, now);
                }
            }
            State::Connecting { conn, mut rest } if conn == key => {
                let again = if stopping { None } else { self.try_without_pair(number, moving, &failure, now) };
                let Some(channel) = self.channels.get_mut(&number) else { return };
                let text = failure.message;
                if let Some(address) = again {
                    rest.push_front(address);
                    self.connect_next(number, rest, now);
                } else if stopping {
                    let ended = channel.fail_waiting(code::UNAVAILABLE, "starwire: the server was stopped", true);
                    self.dispatch.metrics.ended_locally.add(ended);
                } else if failure.code == code::UNAVAILABLE && !was_ready {
                    // That a guess fails is no news.
                    channel.errors.extend(Some(text).filter(|text| !text.is_empty()));
                    self.connect_next(number, rest, now);
                } else {
                    self.attempt_failed(number, failure.code, &text, now);
                }
            }
            other => channel.state = other,
        }
    }

    /// No address of the peer works.
    pub(crate) fn attempt_failed(&mut self, number: u32, code: i32, why: &str, now: Instant) {
        let failure = Failure { code, message: why.to_owned() };
        if !self.looks_again(number, &failure, now) {
            self.give_up(number, &failure, now);
        }
    }

    /// Ends requests that do not wait for another attempt.
    pub(crate) fn tell_impatient(&mut self, number: u32, failure: &Failure) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let ended = channel.fail_waiting(failure.code, &channel.unreachable(failure), false);
        self.dispatch.metrics.ended_locally.add(ended);
        self.dispatch.note();
    }

    /// The attempt failed. Requests that do not wait end; the others get another attempt, unless that cannot help.
    pub(crate) fn give_up(&mut self, number: u32, failure: &Failure, now: Instant) {
        let random = self.random();
        self.dispatch.note();
        self.dispatch.metrics.connect_failures.add(1);
        let Some(channel) = self.channels.get_mut(&number) else { return };
        channel.attempt = channel.attempt.wrapping_add(1);
        channel.failed(now, random);
        channel.state = State::Idle;
        let message = channel.unreachable(failure);
        let ended = channel.fail_waiting(failure.code, &message, is_final(failure.code));
        self.dispatch.metrics.ended_locally.add(ended);
        channel.errors.push(failure.message.clone());
        let somebody_waits = !channel.waiting.is_empty();
        if channel.should_tell(now, somebody_waits) {
            let line = format!("{message}; {} requests are waiting, retrying", channel.waiting.len());
            self.shared.host.log(Level::Warning, &line);
        }
        if somebody_waits {
            self.dial(number, now);
        } else {
            channel.wanted_since = None;
        }
    }

    pub(crate) fn channel_timer(&mut self, number: u32, now: Instant) {
        let Some(channel) = self.channels.get_mut(&number) else { return };
        let expired = channel.expire_waiting(now);
        self.dispatch.metrics.deadlines_exceeded.add(expired);
        self.dispatch.note();
        let Some(channel) = self.channels.get_mut(&number) else { return };
        if let Some(at) = channel.next_deadline() {
            self.arm_channel(number, at);
        }
        let Some(channel) = self.channels.get_mut(&number) else { return };
        match &channel.state {
            State::BackingOff => {
                if channel.waiting.is_empty() {
                    channel.state = State::Idle;
                    channel.wanted_since = None;
                } else {
                    self.dial(number, now);
                }
            }
            State::Asking { failure } if channel.attempt_ends.is_some_and(|t| t <= now) => {
                let failure = failure.clone();
                self.give_up(number, &failure, now);
            }
            State::LookingUp if channel.attempt_ends.is_some_and(|t| t <= now) => {
                self.attempt_failed(number, code::UNAVAILABLE, "timed out looking up its data address", now);
            }
            State::Connecting { conn, .. } if channel.attempt_ends.is_some_and(|t| t <= now) => {
                let conn = *conn;
                self.lose(conn, code::UNAVAILABLE, "timed out connecting".into());
            }
            _ => {}
        }
    }
}

/// The address, unless the target is a name.
fn literal(target: &HostPort) -> Option<SocketAddr> {
    target.host.parse().ok().map(|ip: IpAddr| SocketAddr::new(ip, target.port))
}

fn refuse<O: Op>(waiting: Waiting<O>, message: &str) {
    waiting.what.into_op().done(&Outcome::Local { code: code::UNAVAILABLE, message });
}
