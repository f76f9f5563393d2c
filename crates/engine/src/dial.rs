//! The client side of a shard: starts requests, and carries out the decisions of its [channels](Channel).

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::api::{Host, Level, PendingOp};
use crate::command::{Command, NewCall, NewRecv, Request};
use crate::config::{Config, DataAddress, Shortcut};
use crate::conn::Side;
use crate::metrics;
use crate::peers::{Channel, Do, Peer, Waiting, is_guess};
use crate::shard::{Shard, TimerKey, mark};
use starwire_net::reactor::topology::Topology;
use starwire_net::transport::{SocketAddress, tcp, unix};
use starwire_protocol::{Call, Connection, Failure, Outcome, Recv, code};

impl<H: Host> Shard<H> {
    pub(crate) fn submit(&mut self, channel: u32, id: u64, mut request: Request<H::Op>, now: Instant) {
        request.stamp(now);
        let (deadline_ms, wait_for_ready) = match &request {
            Request::Call(call) => (call.deadline_ms, call.wait_for_ready),
            Request::Recv(_) => (0, false),
        };
        let deadline = (deadline_ms > 0).then(|| now + Duration::from_millis(u64::from(deadline_ms)));
        let waiting = Waiting { id, request, deadline, wait_for_ready };
        let Some(found) = self.channels.get_mut(&channel) else {
            return self.end(waiting.request.into_op(), code::UNAVAILABLE, "starwire: the task has left");
        };
        match found.connection().filter(|_| self.stopping.is_none()) {
            Some(conn) => {
                self.start(conn, waiting, now);
                self.deliver(conn, now);
            }
            None => {
                found.submit(waiting, now);
                self.act(channel, now);
            }
        }
    }

    /// Hands a request to an open connection. The caller delivers the events.
    fn start(&mut self, key: u64, waiting: Waiting<Request<H::Op>>, now: Instant) {
        let Waiting { id, request, deadline, .. } = waiting;
        let Some(conn) = self.conns.get_mut(&key).filter(|c| c.closing.is_none()) else {
            // The connection is being closed; a new request shares its fate.
            let message = "starwire: the connection was just lost (Socket closed)";
            return self.end(request.into_op(), code::UNAVAILABLE, message);
        };
        match request {
            Request::Recv(recv) => {
                self.dispatch.metrics.tensors_requested.add(1);
                let NewRecv { step, prefix, frame, iter, op } = recv;
                conn.proto.recv(now, Recv { id, step, prefix: &prefix, frame, iter, deadline, op });
            }
            Request::Call(call) => {
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
        mark(&mut self.dirty, conn);
        if deadline.is_some() {
            self.arm(key);
        }
    }

    pub(crate) fn cancel(&mut self, channel: u32, id: u64, code: i32, message: &str, now: Instant) {
        let Some(key) = self.channels.get(&channel).and_then(Channel::connection) else {
            return self.tell(channel, now, |channel| channel.cancel(id, code, message));
        };
        if let Some(conn) = self.conns.get_mut(&key) {
            self.dispatch.metrics.cancels_sent.add(1);
            conn.proto.cancel(now, id, code, message);
            mark(&mut self.dirty, conn);
            self.deliver(key, now);
        }
    }

    /// Gives a channel an input, and carries out its decisions.
    pub(crate) fn tell(&mut self, channel: u32, now: Instant, input: impl FnOnce(&mut Channel<Request<H::Op>>)) {
        self.channels.get_mut(&channel).map(input);
        self.act(channel, now);
    }

    /// Carries out the decisions of a channel. The caller delivers the events of a connection that became ready.
    fn act(&mut self, channel: u32, now: Instant) {
        while let Some(action) = self.channels.get_mut(&channel).and_then(Channel::poll) {
            let metrics = &self.dispatch.metrics;
            match action {
                Do::Resolve => self.resolve(channel, now),
                Do::Connect { address, with_pairs } => {
                    let result = self.connect(channel, &address, with_pairs, now);
                    if let Some(channel) = self.channels.get_mut(&channel) {
                        channel.connecting(result, now);
                    }
                }
                Do::Close(conn, why) => self.lose(conn, code::UNAVAILABLE, why.to_owned()),
                Do::Connected { conn, after, is_new } => {
                    metrics.connect_time.record(after);
                    if is_new {
                        self.note_name(channel, conn);
                    }
                }
                Do::Start(conn, requests) => requests.into_iter().for_each(|waiting| self.start(conn, waiting, now)),
                Do::End { requests, code, message } => {
                    let is_late = code == code::DEADLINE_EXCEEDED;
                    let counter = if is_late { &metrics.deadlines_exceeded } else { &metrics.ended_locally };
                    counter.add(requests.len() as u64);
                    requests.into_iter().for_each(|waiting| self.end(waiting.request.into_op(), code, &message));
                }
                Do::WakeAt(at) => {
                    self.timers.start(at, TimerKey::Channel(channel));
                }
                Do::Log(level, line) => self.shared.host.log(level, &line),
                Do::CountFailedAttempt => metrics.connect_failures.add(1),
                Do::CountFallback => metrics.verbs_fallbacks.add(1),
            }
        }
    }

    fn end(&mut self, op: PendingOp<H::Op>, code: i32, message: &str) {
        self.dispatch.note();
        op.done(&Outcome::Local { code, message });
    }

    /// Resolves the peer's host on a separate thread, because name services may block.
    fn resolve(&mut self, channel: u32, now: Instant) {
        let Some(found) = self.channels.get_mut(&channel) else { return };
        let target = found.peer().data.address().clone();
        if let Ok(ip) = target.host.parse() {
            let addresses = candidates(&self.shared.config, found.peer(), vec![SocketAddr::new(ip, target.port)]);
            return found.resolved(Ok(addresses), now);
        }
        let (shared, shard, host, peer) = (self.shared.clone(), self.index, target.host.clone(), found.peer().clone());
        let thread = std::thread::Builder::new().name("starwire-names".into()).spawn(move || {
            // Keep off the CPU of a pinned reactor; a failure only costs time.
            let _ = shared.topology.as_ref().map(Topology::unpin_current_thread);
            let failure = |error| Failure {
                code: code::UNAVAILABLE,
                message: format!("cannot look up {}: {error}", target.host),
            };
            let found = target.resolve().map_err(failure);
            let result = found.map(|addresses| candidates(&shared.config, &peer, addresses));
            shared.send(shard, Command::Addresses { channel, result });
        });
        if let Err(error) = thread {
            let message = format!("cannot start a thread to look up {host}: {error}");
            found.resolved(Err(Failure { code: code::RESOURCE_EXHAUSTED, message }), now);
        }
    }

    fn connect(
        &mut self,
        channel: u32,
        address: &SocketAddress,
        with_pairs: bool,
        now: Instant,
    ) -> Result<u64, String> {
        let peer = self.channels.get(&channel).ok_or("there is no such channel")?.peer();
        let (task, has_joined) = (peer.task.clone(), peer.has_joined);
        let config = &self.shared.config;
        // A secret or a certificate proves the name that a peer gives, and the network may lead to another member.
        // Without them, whoever answers at the address is the peer, except on a unix socket: an address that belongs
        // to several hosts leads to the wrong one. A task that has joined chose the address itself.
        let has_proof = config.secret.is_some() || config.tls.is_some();
        let expected = (has_proof || has_joined || is_guess(address)).then(|| task.clone());
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
        let offered_pairs = guard.is_none() && self.offer_pairs(&mut settings, with_pairs);
        if guard.is_some() {
            self.offer_loans(&mut settings);
        }
        let session = self.session_to(address)?.map(Box::new);
        let proto = Connection::client(settings, now);
        let token = self.driver.register(fd).map_err(|e| e.to_string())?;
        let key = self.add_conn(token, Side::Client { channel }, proto, format!("{task} at {address}"));
        if let Some(conn) = self.conns.get_mut(&key) {
            conn.guard = guard;
            conn.tls = session;
            conn.offered_pairs = offered_pairs;
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
            return self.lose(key, code::UNAVAILABLE, error.to_string());
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
        mark(&mut self.dirty, conn);
        self.arm(key);
        self.receive_on(key);
    }

    /// Logs a name that differs from the one of this side, once for each incarnation.
    fn note_name(&self, channel: u32, conn: u64) {
        let own = self.conns.get(&conn).and_then(|conn| conn.peer.as_ref()).map(|peer| &peer.task);
        let (Some(own), Some(channel)) = (own, self.channels.get(&channel)) else { return };
        let Peer { task, grpc_address: address, data, .. } = &**channel.peer();
        if task == own {
            return;
        }
        let tasks = &self.shared.config.identity.tasks;
        let elsewhere = tasks.iter().find(|(name, at)| name == own && at != address);
        match elsewhere {
            Some((_, at)) => self.shared.host.log(
                Level::Warning,
                &format!("starwire: {task} ({address}) reports its name as {own}, which is at {at} in this server's ClusterSpec: check job_name and task_index of both tasks{}", data.remark(address)),
            ),
            None => self.shared.host.log(Level::Info, &format!("starwire: {task} ({address}) reports its name as {own}")),
        }
    }

    /// The peer will answer open requests, but takes no new ones on this connection.
    pub(crate) fn said_goodbye(&mut self, key: u64, reason: String) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.goodbye = Some(reason);
        if let Side::Client { channel } = conn.side {
            let now = self.dispatch.now;
            self.tell(channel, now, |channel| channel.goodbye(key));
        }
    }
}

/// The addresses to try: a task on this host has a unix socket as well.
fn candidates(config: &Config, peer: &Peer, found: Vec<SocketAddr>) -> Vec<SocketAddress> {
    // A map has the last word on where peers are reached.
    let takes_shortcut = config.unix == Shortcut::Auto && !matches!(peer.data, DataAddress::Mapped(_));
    let beside = found.iter().filter(|_| takes_shortcut).flat_map(|address| unix::possibly_beside(*address));
    let mut all: Vec<SocketAddress> = beside.collect();
    all.extend(found.into_iter().map(SocketAddress::from));
    all
}
