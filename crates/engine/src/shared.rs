//! The part of an engine that every thread can reach.

use std::any::Any;
use std::cell::RefCell;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::admission::Source;
use crate::api::{Host, Level};
use crate::command::Command;
use crate::config::{Config, is_unspecified};
use crate::control::{ControlError, ControlService};
use crate::joined::{ChannelAt, Joined, Left};
use crate::log_limiter::LogLimiter;
use crate::metrics::{Connections, Metrics};
use crate::system::peer_memory::Unreadable;
use crate::system::{fork, random};
use crate::tls::Credentials;
use starwire_net::reactor::mailbox::Sender;
use starwire_net::reactor::topology::Topology;
use starwire_protocol::digest::FEATURE_DIGESTS;
use starwire_protocol::{Claim, Failure, Outcome, Settings, code};

pub struct Shared<H: Host> {
    /// Tells engines of one process apart.
    pub(crate) number: u64,
    pub(crate) host: H,
    pub(crate) config: Config,
    pub(crate) incarnation: u64,
    /// One per reactor, set once all are running.
    pub(crate) senders: OnceLock<Vec<Sender<Command<H>>>>,
    /// The process is exiting: reactors stop where they are and make no callbacks.
    pub(crate) frozen: AtomicBool,
    /// Each reactor that may still make callbacks has one.
    pub(crate) callbacks: Arc<()>,
    /// Each thread that an exit waits for has one: a reactor until it has said GOODBYE, the state's thread until its
    /// end.
    pub(crate) unfinished: Arc<()>,
    /// All reactors of the process are frozen, and say GOODBYE.
    pub(crate) leaving: AtomicBool,
    pub(crate) forks: u64,
    /// The time. In a simulation it is virtual.
    pub(crate) clock: fn() -> Instant,
    pub(crate) metrics: Metrics,
    pub(crate) connections: Arc<Connections>,
    pub(crate) started: Instant,
    pub(crate) control: OnceLock<ControlService>,
    pub(crate) log_limiter: LogLimiter,
    /// Of tasks that join and leave.
    join_limiter: LogLimiter,
    pub(crate) unreadable: Unreadable,
    /// Another process has the task now, at this address.
    pub(crate) moved_to: OnceLock<String>,
    joined: Mutex<Joined>,
    /// As seen by the thread that made the engine, before any was pinned.
    pub(crate) topology: Option<Topology>,
}

thread_local! {
    /// On a reactor thread: which one, and its queue for its own callbacks.
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
}

struct Here {
    engine: u64,
    shard: usize,
    /// The shard's [`LocalQueue`].
    queue: Rc<dyn Any>,
}

/// Commands from a reactor's own callbacks. Saves the mailbox's atomics and the wake-up.
pub struct LocalQueue<H: Host>(Rc<RefCell<Vec<Command<H>>>>);

impl<H: Host> LocalQueue<H> {
    /// Makes this thread the reactor thread of a shard.
    pub fn enter(engine: u64, shard: usize) -> Self {
        let queue = Rc::new(RefCell::new(Vec::new()));
        HERE.with_borrow_mut(|here| *here = Some(Here { engine, shard, queue: queue.clone() }));
        Self(queue)
    }

    pub fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Takes the queued commands and returns the emptied vector of the last call.
    pub fn take(&self, into: &mut Vec<Command<H>>) {
        std::mem::swap(&mut *self.0.borrow_mut(), into);
    }
}

/// Whether the calling thread is one of this engine's reactors.
pub(crate) fn is_reactor_of(engine: u64) -> bool {
    HERE.with_borrow(|here| here.as_ref().is_some_and(|h| h.engine == engine))
}

/// The unanswered requests that one connection may have; more wait at the sender.
const MAX_RECVS: u32 = 65_536;

impl<H: Host> Shared<H> {
    pub(crate) fn new(config: Config, host: H, incarnation: u64) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            host,
            incarnation,
            senders: OnceLock::new(),
            frozen: AtomicBool::new(false),
            callbacks: Arc::default(),
            unfinished: Arc::default(),
            leaving: AtomicBool::new(false),
            forks: fork::count(),
            clock: Instant::now,
            metrics: Metrics::default(),
            connections: Arc::default(),
            started: Instant::now(),
            control: OnceLock::new(),
            log_limiter: LogLimiter::default(),
            join_limiter: LogLimiter::default(),
            unreadable: Unreadable::default(),
            moved_to: OnceLock::new(),
            joined: Mutex::default(),
            topology: Topology::detect().ok(),
            config,
        }
    }

    /// Settings of a connection of a peer.
    pub(crate) fn settings_for_peer(&self) -> Settings {
        let mut settings = self.settings(None);
        settings.address.clear();
        settings.moved_to = self.moved_to.get().cloned().unwrap_or_default();
        // Replies need no bound: they were requested, and are bounded by what their receivers allocate.
        settings.limits.max_payload = self.config.max_call_bytes;
        settings
    }

    /// Settings of a connection to a peer.
    pub(crate) fn settings(&self, expected_task: Option<String>) -> Settings {
        let config = &self.config;
        let mut settings =
            Settings::new(&config.identity.task, config.identity.protocol.name(), self.incarnation, random::bytes());
        settings.cluster_id.clone_from(&config.cluster_id);
        settings.expected_task = expected_task;
        settings.address.clone_from(&config.identity.grpc_address);
        settings.secret.clone_from(&config.secret);
        if config.secret.is_some() {
            settings.features |= FEATURE_DIGESTS;
            settings.required_features |= FEATURE_DIGESTS;
        }
        settings.keepalive_interval = config.keepalive.interval;
        settings.keepalive_timeout = config.keepalive.timeout;
        settings.limits.max_recvs = MAX_RECVS;
        settings.limits.max_call_bytes = settings.limits.max_call_bytes.min(config.max_call_bytes);
        settings
    }

    /// The tasks that have joined.
    pub(crate) fn joined(&self) -> MutexGuard<'_, Joined> {
        self.joined.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A peer says who it is: whether it may be, if its task is not in the ClusterSpec.
    pub(crate) fn arrives(&self, connection: u64, claim: &Claim<'_>) -> Result<(), Failure> {
        let Config { joinable, identity, .. } = &self.config;
        let Some(joinable) = joinable.as_ref().filter(|_| identity.address_of(claim.task).is_none()) else {
            return Ok(());
        };
        let refuse = |message| Failure { code: code::FAILED_PRECONDITION, message };
        let Claim { task, address, .. } = claim;
        if !joinable.includes(task) {
            let why = format!("it is not in the ClusterSpec of {}, whose STARWIRE_JOIN is {joinable}", identity.task);
            return Err(refuse(format!("{task} cannot join: {why}")));
        }
        match self.config.data_address(task, address) {
            Ok(data) if data.address().port != 0 && !is_unspecified(&data.address().host) => {}
            Ok(_) => return Err(refuse(format!("{task} cannot join: nobody can connect to its address, {address}"))),
            Err(error) => return Err(refuse(format!("{task} cannot join: {error}"))),
        }
        let is_new = self.joined().arrives(connection, claim).map_err(refuse)?;
        if is_new {
            self.metrics.count(|cells| cells.tasks_joined.add(1));
            self.log_change(task, address, "joined");
        }
        Ok(())
    }

    /// A connection that a peer had opened is closed.
    pub(crate) fn leaves(&self, connection: u64) {
        if self.config.joinable.is_none() {
            return;
        }
        let left = self.joined().leaves(connection);
        let Some(Left { task, address, channel }) = left else { return };
        if let Some(ChannelAt { shard, number }) = channel {
            self.send(shard, Command::Disconnect { channel: number });
        }
        self.metrics.count(|cells| cells.tasks_left.add(1));
        self.log_change(&task, &address, "left");
    }

    pub(crate) fn now(&self) -> Instant {
        (self.clock)()
    }

    fn log_change(&self, task: &str, address: &str, what: &str) {
        if self.join_limiter.allows(&format!("{task} {what}"), self.now()) {
            let line = format!("starwire: {task} at {address} {what} (repeats are suppressed for a minute)");
            self.host.log(Level::Info, &line);
        }
    }

    /// The certificates that are valid now, if this task has TLS.
    pub(crate) fn credentials(&self) -> Option<Arc<Credentials>> {
        let tls = self.config.tls.as_ref()?;
        Some(tls.current(|level, line| self.host.log(level, line)))
    }

    /// A connection that speaks HTTP: for the control service.
    pub(crate) fn serve_http(&self, fd: OwnedFd, first: Vec<u8>, name: &str, now: Instant) {
        if let Some(Err(error)) = self.control.get().map(|c| c.handle(fd, first)) {
            self.log_refusal(name, &error, now);
        }
    }

    pub(crate) fn log_refusal(&self, name: &str, error: &ControlError, now: Instant) {
        if self.log_limiter.allows(&format!("HTTP {}", party_of(name)), now) {
            let line = format!(
                "starwire: refused an HTTP client on the data port, {name}: {error} (repeats from this address are suppressed for a minute)"
            );
            self.host.log(Level::Warning, &line);
        }
    }

    pub fn send(&self, shard: usize, command: Command<H>) {
        // The request of a cancellation may be in the mailbox, and must not be overtaken.
        if matches!(command, Command::Cancel { .. }) {
            return self.send_by_mailbox(shard, command);
        }
        let command = HERE.with_borrow(|here| {
            let here = here.as_ref().filter(|here| here.engine == self.number && here.shard == shard);
            match here.and_then(|here| here.queue.downcast_ref::<RefCell<Vec<Command<H>>>>()) {
                Some(queue) => {
                    queue.borrow_mut().push(command);
                    None
                }
                None => Some(command),
            }
        });
        if let Some(command) = command {
            self.send_by_mailbox(shard, command);
        }
    }

    /// Behind all that other threads have sent before.
    fn send_by_mailbox(&self, shard: usize, command: Command<H>) {
        if self.forks != fork::count() {
            return end(
                command,
                9,
                "starwire: this process was forked from one that runs a server: create the server after the fork",
            );
        }
        match self.senders.get().and_then(|s| s.get(shard)) {
            Some(sender) => {
                if let Err(command) = sender.send(command) {
                    end(command, 14, "starwire: the server was stopped");
                }
            }
            None => end(command, 14, "starwire: the server is not running"),
        }
    }
}

/// The party behind a connection with this name, for one line each. A client's port means nothing, it chooses its own
/// task name, and all addresses of an IPv6 network may be its own.
pub(crate) fn party_of(name: &str) -> String {
    let address = name.rsplit_once(" at ").map_or(name, |(_, address)| address);
    match address.parse::<SocketAddr>() {
        Ok(address) => format!("{:?}", Source::of_ip(address.ip())),
        Err(_) => address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned(),
    }
}

/// Ends a command that no reactor will take, so that no request stays unanswered.
pub(crate) fn end<H: Host>(command: Command<H>, code: i32, message: &str) {
    let outcome = Outcome::Local { code, message };
    match command {
        Command::Request { request, .. } => request.into_op().done(&outcome),
        Command::OpenChannel { .. }
        | Command::CloseChannel { .. }
        | Command::Disconnect { .. }
        | Command::Cancel { .. }
        | Command::Reply { .. }
        | Command::Addresses { .. }
        | Command::Adopt { .. }
        | Command::Moved { .. }
        | Command::Star(_)
        | Command::Stop => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_network_is_one_party() {
        let parties =
            |names: &mut dyn Iterator<Item = String>| names.map(|name| party_of(&name)).collect::<HashSet<_>>();
        let of_one_network = &mut (0..2000).map(|n| format!("/job:worker/replica:0/task:{n} at [2001:db8::{n:x}]:{n}"));
        assert_eq!(parties(of_one_network).len(), 1);
        assert_eq!(parties(&mut (0..200).map(|n| format!("[2001:db8:0:{n:x}::1]:80"))).len(), 200);
        assert_eq!(parties(&mut (0..200).map(|n| format!("10.0.0.{n}:80"))).len(), 200);
        assert_eq!(party_of("10.0.0.1:80"), party_of("/job:ps/replica:0/task:0 at [::ffff:10.0.0.1]:81"));
        assert_eq!(party_of("ps-0.train.svc:2222"), party_of("ps-0.train.svc:2223"));
        assert_eq!(party_of("a local process"), "a local process");
    }
}
