//! The client side of a shard: how a channel finds its peer and connects, and when waiting requests end.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::api::{Host, Level, Op};
use crate::channel::{State, Waiting, What};
use crate::command::{NewCall, NewRecv};
use crate::conn::Role;
use crate::metrics;
use crate::resolver::is_guess;
use crate::shard::Shard;
use starwire_net::transport::{SocketAddress, tcp, unix};
use starwire_protocol::{Call, Connection, Failure, Outcome, Recv, code};

/// Longest attempt to connect, so that a peer that is down is noticed. Requests that wait for the peer get more
/// attempts.
const ATTEMPT: Duration = Duration::from_secs(10);

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
        self.look_up(number, attempt, now);
    }

    pub(crate) fn connect_next(&mut self, number: u32, mut rest: VecDeque<SocketAddress>, now: Instant) {
        while let Some(address) = rest.pop_front() {
            let name = address.to_string();
            match self.connect(number, &address, now) {
                Ok(conn) => {
                    if let Some(channel) = self.channels.get_mut(&number) {
                        channel.state = State::Connecting { conn, rest };
                    }
                    return;
                }
                Err(_) if is_guess(&address) => {}
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
        let task = channel.shared.task.clone();
        let config = &self.shared.config;
        // A secret or a certificate proves the name that a peer gives, and the network may lead to another member.
        // Without them, whoever answers at the address is the peer, except on a unix socket: an address that belongs
        // to several hosts leads to the wrong one.
        let has_proof = config.secret.is_some() || config.tls.is_some();
        let expected = (has_proof || is_guess(address)).then(|| task.clone());
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

    /// Logs a name that differs from the one of this side, once for each incarnation.
    fn note_name(&self, number: u32, own: &str) {
        let Some(channel) = self.channels.get(&number) else { return };
        let (task, address) = (&channel.shared.task, &channel.shared.grpc_address);
        if task == own {
            return;
        }
        let tasks = &self.shared.config.identity.tasks;
        let elsewhere = tasks.iter().find(|(name, at)| name == own && at != address);
        match elsewhere {
            Some((_, at)) => self.shared.host.log(
                Level::Warning,
                &format!("starwire: {task} ({address}) reports its name as {own}, which is at {at} in this server's ClusterSpec: check job_name and task_index of both tasks{}", channel.shared.data.remark(address)),
            ),
            None => self.shared.host.log(Level::Info, &format!("starwire: {task} ({address}) reports its name as {own}")),
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

    /// No address of the peer works. Requests that do not wait end; the others get another attempt, unless that cannot
    /// help.
    pub(crate) fn attempt_failed(&mut self, number: u32, code: i32, why: &str, now: Instant) {
        let failure = &Failure { code, message: why.to_owned() };
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
            State::LookingUp if channel.attempt_ends.is_some_and(|t| t <= now) => {
                self.attempt_failed(number, code::UNAVAILABLE, "timed out looking up its host", now);
            }
            State::Connecting { conn, .. } if channel.attempt_ends.is_some_and(|t| t <= now) => {
                let conn = *conn;
                self.lose(conn, code::UNAVAILABLE, "timed out connecting".into());
            }
            _ => {}
        }
    }
}

/// Whether waiting cannot help: a wrong peer stays wrong, but a peer that is down may come up.
fn is_final(code: i32) -> bool {
    !matches!(code, code::UNAVAILABLE | code::DEADLINE_EXCEEDED | code::CANCELLED)
}

fn refuse<O: Op>(waiting: Waiting<O>, message: &str) {
    waiting.what.into_op().done(&Outcome::Local { code: code::UNAVAILABLE, message });
}
