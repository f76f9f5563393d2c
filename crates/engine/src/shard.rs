//! A reactor thread: its loop and its connections.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::admission::{Admission, Listener};
use crate::api::{Host, Level};
use crate::command::{Command, Request};
use crate::conn::{CallMemory, Conn, DiscardBuffer, Side};
use crate::dispatch::{ConnEvent, Dispatcher};
use crate::keys::{NumberMap, conn_key};
use crate::metrics::{Direction, State};
use crate::peers::Channel;
use crate::shared::{self, LocalQueue, Shared};
use starwire_net::reactor::driver::{Completion, Driver, Token};
use starwire_net::reactor::mailbox::Receiver;
use starwire_net::reactor::polling::Polling;
use starwire_net::reactor::timers::Timers;
use starwire_protocol::{Connection, PeerInfo, code};

/// Most commands between two looks at the sockets.
const COMMANDS_PER_ROUND: usize = 4096;
/// The longest busy wait before a sleep, where polling is on.
const LONGEST_SPIN: Duration = Duration::from_micros(200);
/// How long a stopping reactor waits for the kernel to release its memory.
const STOP_PATIENCE: Duration = Duration::from_secs(2);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum TimerKey {
    Conn(u64),
    Channel(u32),
    /// The handshake budget is not used up any more.
    Handshakes,
}

pub struct Shard<H: Host> {
    pub(crate) index: usize,
    pub(crate) shared: Arc<Shared<H>>,
    pub(crate) driver: Box<dyn Driver>,
    pub(crate) mailbox: Receiver<Command<H>>,
    /// Boxed: a table that holds connections by value is one block, copied whenever it grows, and the allocator keeps
    /// what many of them left behind.
    pub(crate) conns: NumberMap<u64, Box<Conn<H>>>,
    pub(crate) tokens: NumberMap<u64, u64>,
    pub(crate) channels: NumberMap<u32, Channel<Request<H::Op>>>,
    pub(crate) dispatch: Dispatcher<H>,
    pub(crate) timers: Timers<TimerKey>,
    pub(crate) polling: Polling,
    /// Looks at the sockets by busy waits.
    pub(crate) looks: u32,
    listeners: Vec<(Token, Listener)>,
    pub(crate) dirty: Vec<u64>,
    pub(crate) discard: DiscardBuffer,
    next_conn: u64,
    next_adopter: usize,
    pub(crate) admission: Admission,
    pub(crate) stopping: Option<Instant>,
    queue: LocalQueue<H>,
    local: Vec<Command<H>>,
    pub(crate) completions: Vec<Completion>,
    random: u64,
}

impl<H: Host> Shard<H> {
    pub(crate) fn new(
        index: usize,
        shared: Arc<Shared<H>>,
        driver: Box<dyn Driver>,
        mailbox: Receiver<Command<H>>,
        admission: Admission,
    ) -> Self {
        let polling = if shared.config.polling { Polling::up_to(LONGEST_SPIN) } else { Polling::off() };
        let dispatch = Dispatcher::new(shared.clone());
        let queue = LocalQueue::enter(shared.number, index);
        let random = shared.incarnation ^ (index as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Self {
            index,
            shared,
            driver,
            mailbox,
            conns: NumberMap::default(),
            tokens: NumberMap::default(),
            channels: NumberMap::default(),
            dispatch,
            timers: Timers::default(),
            polling,
            looks: 0,
            listeners: Vec::new(),
            dirty: Vec::new(),
            discard: DiscardBuffer::new(),
            next_conn: 0,
            next_adopter: 0,
            admission,
            stopping: None,
            queue,
            local: Vec::new(),
            completions: Vec::new(),
            random,
        }
    }

    /// Takes a listening socket; accepted connections are spread over all shards.
    pub(crate) fn listen(&mut self, fd: OwnedFd, listener: Listener) -> std::io::Result<()> {
        let token = self.driver.register(fd)?;
        self.driver.accept(token)?;
        self.listeners.push((token, listener));
        Ok(())
    }

    /// The loop of the reactor.
    pub(crate) fn run(&mut self) {
        // The owner learns that this thread is a reactor before any other callback.
        self.shared.host.round_end();
        while !self.finished() {
            if self.shared.frozen.load(Ordering::Acquire) {
                return self.freeze();
            }
            let now = Instant::now();
            self.dispatch.now = now;
            self.take_commands(now);
            self.fire_timers(now);
            self.flush(now);
            self.dispatch.end_round();
            // Requests made by this round's callbacks are sent with it.
            if self.has_local() {
                self.take_local(now);
                self.flush(now);
            }
            self.wait(now);
            let now = Instant::now();
            self.dispatch.now = now;
            let mut completions = std::mem::take(&mut self.completions);
            for completion in completions.drain(..) {
                self.complete(completion, now);
            }
            self.completions = completions;
            self.count_pairs();
        }
        self.let_go();
        self.close_mailbox();
        self.dispatch.stop_star();
    }

    /// No operation may outlive its memory.
    fn let_go(&mut self) {
        if !self.conns.is_empty() && !self.driver.quiesce(STOP_PATIENCE) {
            std::mem::forget(std::mem::take(&mut self.conns));
        }
    }

    /// After a panic: closes the mailbox and drops the rest, which ends it.
    pub(crate) fn abandon(&mut self) {
        self.let_go();
        self.conns.clear();
        self.channels.clear();
        self.close_mailbox();
        self.dispatch.stop_star();
    }

    pub(crate) fn finished(&self) -> bool {
        self.stopping.is_some_and(|until| self.conns.is_empty() || Instant::now() >= until)
    }

    /// The process is exiting: makes no callbacks and frees nothing, because memory that callbacks own may be gone.
    fn freeze(&mut self) {
        self.send_goodbyes();
        std::mem::forget(std::mem::take(&mut self.conns));
        std::mem::forget(std::mem::take(&mut self.channels));
        self.dispatch.freeze_star();
        self.mailbox.close();
        while let Some(command) = self.mailbox.pop() {
            std::mem::forget(command);
        }
    }

    fn close_mailbox(&mut self) {
        self.mailbox.close();
        while let Some(command) = self.mailbox.pop() {
            shared::end(command, code::UNAVAILABLE, "starwire: the server was stopped");
        }
        self.queue.take(&mut self.local);
        for command in std::mem::take(&mut self.local) {
            shared::end(command, code::UNAVAILABLE, "starwire: the server was stopped");
        }
        self.dispatch.end_round();
    }

    fn take_commands(&mut self, now: Instant) {
        self.take_local(now);
        let mut taken = 0;
        while taken < COMMANDS_PER_ROUND {
            let Some(command) = self.mailbox.pop() else { break };
            taken += 1;
            self.execute(command, now);
        }
        self.dispatch.metrics.mailbox_messages.add(taken as u64);
    }

    pub(crate) fn has_local(&self) -> bool {
        !self.queue.is_empty()
    }

    fn take_local(&mut self, now: Instant) {
        let mut local = std::mem::take(&mut self.local);
        self.queue.take(&mut local);
        for command in local.drain(..) {
            self.execute(command, now);
        }
        self.local = local;
    }

    fn execute(&mut self, command: Command<H>, now: Instant) {
        match command {
            Command::Request { channel, id, request } => self.submit(channel, id, request, now),
            Command::Reply { conn, id, code, meta, payload } => {
                if let Some(conn) = self.conns.get_mut(&conn) {
                    conn.proto.reply(id, code, meta.as_slice(), payload);
                    mark(&mut self.dirty, conn);
                }
            }
            Command::Cancel { channel, id, code, message } => self.cancel(channel, id, code, &message, now),
            Command::OpenChannel { channel, peer } => {
                let made = Channel::new(peer, self.shared.config.connect_timeout, self.random());
                self.channels.insert(channel, made);
            }
            Command::CloseChannel { channel } => {
                self.tell(channel, now, |channel| channel.stop(now));
                let Some(conn) = self.channels.remove(&channel).and_then(|channel| channel.connection()) else {
                    return;
                };
                self.lose(conn, code::UNAVAILABLE, "the task has left".to_owned());
            }
            Command::Addresses { channel, result } => {
                self.tell(channel, now, |channel| channel.resolved(result, now));
            }
            Command::Adopt { fd, listener } => self.adopt(fd, listener, now),
            Command::Star(command) => {
                let Some((key, answer)) = self.dispatch.star_command(*command) else { return };
                if let Some(conn) = self.conns.get_mut(&key) {
                    conn.answer(answer);
                    mark(&mut self.dirty, conn);
                }
            }
            Command::Stop => self.stop(now),
        }
    }

    fn stop(&mut self, now: Instant) {
        if self.stopping.is_some() {
            return;
        }
        self.stopping = Some(now + STOP_PATIENCE);
        for (token, _) in std::mem::take(&mut self.listeners) {
            self.driver.close(token);
        }
        let channels: Vec<u32> = self.channels.keys().copied().collect();
        for channel in channels {
            self.tell(channel, now, |channel| channel.stop(now));
        }
        let keys: Vec<u64> = self.conns.keys().copied().collect();
        for key in keys {
            self.close_in_order(key, now);
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.stopping.is_some()
    }

    // Sockets.

    fn complete(&mut self, completion: Completion, now: Instant) {
        match completion {
            Completion::Recv { token, result } => {
                let Some(key) = self.tokens.get(&token.0).copied() else { return };
                match result {
                    Ok(0) => self.ended(key),
                    Ok(n) => self.received(key, n, now),
                    Err(error) => self.lose(key, code::UNAVAILABLE, error.to_string()),
                }
            }
            Completion::Send { token, result } => {
                let Some(key) = self.tokens.get(&token.0).copied() else { return };
                match result {
                    Ok(n) => self.sent(key, n),
                    Err(error) => self.lose(key, code::UNAVAILABLE, error.to_string()),
                }
            }
            Completion::Accepted { listener, result } => self.accepted(listener, result),
            Completion::Connected { token, result } => {
                if let Some(key) = self.tokens.get(&token.0).copied() {
                    self.connected(key, result);
                }
            }
            Completion::Readable { .. } => {}
            Completion::Closed { token } => {
                if let Some(key) = self.tokens.remove(&token.0) {
                    self.closed(key, now);
                }
            }
        }
    }

    fn accepted(&mut self, listener: Token, result: std::io::Result<OwnedFd>) {
        let Some(kind) = self.listeners.iter().find(|l| l.0 == listener).map(|l| l.1) else { return };
        match result {
            Ok(fd) => {
                let shards = self.shared.senders.get().map_or(1, Vec::len);
                let to = self.next_adopter % shards;
                self.next_adopter = self.next_adopter.wrapping_add(1);
                self.shared.send(to, Command::Adopt { fd, listener: kind });
            }
            // At a limit, every listener of every reactor fails again and again.
            Err(error) if self.shared.log_limiter.allows("accept", self.dispatch.now) => {
                self.shared.host.log(
                    Level::Warning,
                    &format!("starwire: cannot accept a connection: {error} (retrying ten times a second; repeats are suppressed for a minute)"),
                );
            }
            Err(_) => {}
        }
    }

    pub(crate) fn add_conn(&mut self, token: Token, side: Side, proto: Connection<CallMemory<H>>, name: String) -> u64 {
        let key = conn_key(self.index, self.next_conn);
        self.next_conn += 1;
        self.tokens.insert(token.0, key);
        let (direction, state) = match side {
            Side::Client { .. } => (Direction::Outgoing, State::Connecting),
            Side::Server => (Direction::Incoming, State::Handshake),
        };
        let entry = self.shared.connections.enter(direction, state, &name, self.index);
        self.conns.insert(key, Box::new(Conn::new(key, token, side, proto, name, entry)));
        key
    }

    fn received(&mut self, key: u64, n: usize, now: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.closing.is_some() {
            conn.drained(n);
            return self.continue_drain(key);
        }
        conn.receiving = false;
        if let Some(tls) = conn.tls.as_mut().filter(|tls| tls.receives) {
            tls.arrived(n);
            return self.receive_on(key);
        }
        if self.took(key, n, now) {
            self.receive_on(key);
        }
    }

    /// `n` bytes are in the targets of the plan. False: the connection ends.
    pub(crate) fn took(&mut self, key: u64, n: usize, now: Instant) -> bool {
        let Some(conn) = self.conns.get_mut(&key) else { return false };
        let result = conn.proto.on_received(now, n, &mut self.dispatch.memory);
        self.deliver(key, now);
        let Some(conn) = self.conns.get_mut(&key) else { return false };
        conn.count(&self.dispatch.metrics);
        if conn.proto.wants_transmit() {
            mark(&mut self.dirty, conn);
        }
        match result {
            Ok(()) => {
                self.arm(key);
                true
            }
            Err(error) => {
                self.broken(key, error, now);
                false
            }
        }
    }

    /// Delivers the events of a connection. To be called after each of its inputs.
    pub(crate) fn deliver(&mut self, key: u64, now: Instant) {
        while let Some(conn) = self.conns.get_mut(&key) {
            match self.dispatch.next(conn) {
                Some(ConnEvent::Ready(peer)) => self.greeted(key, peer, now),
                Some(ConnEvent::Migration(event)) => self.on_migration(key, event, now),
                Some(ConnEvent::Goodbye(reason)) => self.said_goodbye(key, reason),
                None => return,
            }
        }
    }

    /// The handshake with this peer is done.
    pub(crate) fn greeted(&mut self, key: u64, peer: PeerInfo, now: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.entry.set_peer(&peer.task);
        conn.entry.set_state(State::Ready);
        if matches!(conn.side, Side::Server) {
            conn.name = format!("{} at {}", peer.task, conn.name);
        }
        conn.peer = Some(peer);
        if conn.peer_memory.is_some() {
            conn.proto.allow_lending();
            mark(&mut self.dirty, conn);
        }
        self.became_ready(key, now);
    }

    pub(crate) fn receive_on(&mut self, key: u64) {
        let Some(mut conn) = self.conns.get_mut(&key) else { return };
        if conn.tls.is_some() {
            if !self.open_records(key) {
                return;
            }
            let Some(same) = self.conns.get_mut(&key) else { return };
            conn = same;
        }
        let is_loan = conn.proto.loan().is_some();
        match conn.start_receive(&mut *self.driver, &mut self.discard) {
            Ok(None) => {}
            Ok(Some(n)) => self.received(key, n, self.dispatch.now),
            Err(error) if is_loan => self.cannot_borrow(key, &error),
            Err(error) => self.lose(key, code::UNAVAILABLE, format!("cannot receive: {error}")),
        }
    }

    fn sent(&mut self, key: u64, n: usize) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        conn.sent(n);
        if conn.closing.is_some() {
            return self.continue_drain(key);
        }
        self.resume_migrated(key);
        let Some(conn) = self.conns.get_mut(&key) else { return };
        if conn.has_unsent() || conn.proto.wants_transmit() {
            mark(&mut self.dirty, conn);
        }
        if !conn.receiving {
            // The protocol may have paused reading while too much waited to be sent.
            self.receive_on(key);
        }
        self.arm(key);
    }

    fn flush(&mut self, now: Instant) {
        let mut dirty = std::mem::take(&mut self.dirty);
        for key in dirty.drain(..) {
            let Some(conn) = self.conns.get_mut(&key) else { continue };
            conn.dirty = false;
            let started = conn.start_send(&mut *self.driver, now);
            conn.count(&self.dispatch.metrics);
            if let Err(error) = started {
                self.lose(key, code::UNAVAILABLE, format!("cannot send: {error}"));
            }
        }
        // `lose` may have marked others.
        dirty.append(&mut self.dirty);
        self.dirty = dirty;
    }

    pub(crate) fn hand_over_http(&mut self, key: u64) {
        let Some(token) = self.conns.get(&key).map(|conn| conn.token) else { return };
        let fd = match self.driver.release(token) {
            Ok(fd) => fd,
            // Its memory stays until the driver has closed it.
            Err(error) => {
                return self.lose(key, code::UNAVAILABLE, format!("cannot hand over an HTTP client: {error}"));
            }
        };
        self.admission.removed(key);
        self.tokens.remove(&token.0);
        if let Some(conn) = self.conns.remove(&key) {
            self.dispatch.metrics.control_connections.add(1);
            let first = conn.tls.as_ref().map_or(conn.proto.unread(), |tls| tls.received()).to_vec();
            self.shared.serve_http(fd, first, &conn.name, self.dispatch.now);
        }
    }

    pub(crate) fn log_dropped(&self, name: &str, what: &str, now: Instant) {
        if !self.shared.log_limiter.allows(shared::host_of(name), now) {
            return;
        }
        self.shared.host.log(
            Level::Warning,
            &format!("starwire: dropped a connection from {name}: {what} (repeats from this address are suppressed for a minute)"),
        );
    }

    fn became_ready(&mut self, key: u64, now: Instant) {
        let Some(conn) = self.conns.get_mut(&key) else { return };
        let metrics = &self.dispatch.metrics;
        match conn.side {
            Side::Server => {
                metrics.accepts.add(1);
                metrics.connections_in.add(1);
                self.admission.removed(key);
            }
            Side::Client { channel } => {
                metrics.connects.add(1);
                metrics.connections_out.add(1);
                self.settle_path(key, channel, now);
                if let Some(peer) = self.conns.get(&key).and_then(|conn| conn.peer.as_ref()) {
                    let incarnation = peer.incarnation;
                    self.tell(channel, now, |channel| channel.ready(key, incarnation, now));
                }
            }
        }
    }

    pub(crate) fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }
}

pub(crate) fn mark<H: Host>(dirty: &mut Vec<u64>, conn: &mut Conn<H>) {
    if !conn.dirty {
        conn.dirty = true;
        dirty.push(conn.key);
    }
}
