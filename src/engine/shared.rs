//! What every part of one engine can reach from any thread.

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::command::Command;
use super::fork;
use super::lending::Unreadable;
use super::offenders::Offenders;
use super::owner::{Level, Owner};
use crate::config::Config;
use crate::control::ControlService;
use crate::metrics::{Connections, Metrics};
use starwire_net::reactor::mailbox::Sender;
use starwire_net::reactor::topology::Topology;
use starwire_net::transport::tcp::TcpOptions;
use starwire_protocol::{Outcome, Secret, Settings};

pub struct Shared {
    /// Tells engines of one process apart.
    pub(super) number: u64,
    pub(super) owner: Owner,
    pub(super) config: Config,
    pub(super) incarnation: u64,
    /// One per reactor, set once all are running.
    pub(super) senders: OnceLock<Vec<Sender<Command>>>,
    /// The process is exiting: reactors end where they are and call nobody.
    pub(super) frozen: AtomicBool,
    pub(super) forks: u64,
    pub(super) metrics: Metrics,
    pub(super) connections: Arc<Connections>,
    pub(super) started: Instant,
    pub(super) control: OnceLock<ControlService>,
    pub(super) offenders: Offenders,
    pub(super) unreadable: Unreadable,
    /// As the thread found it that made the engine, before any was pinned.
    pub(super) topology: Option<Topology>,
    /// Equal on two servers only if they can reach each other's unix sockets.
    pub(super) host: Option<String>,
}

thread_local! {
    /// On a reactor thread: which one, and what was asked of it by its own callbacks. Saves the mailbox's atomics and
    /// the wake-up.
    static HERE: RefCell<Option<Here>> = const { RefCell::new(None) };
}

struct Here {
    engine: u64,
    shard: usize,
    commands: Vec<Command>,
}

/// Makes this thread the reactor thread of a shard.
pub(super) fn enter(engine: u64, shard: usize) {
    HERE.with_borrow_mut(|here| *here = Some(Here { engine, shard, commands: Vec::new() }));
}

/// Takes what this reactor's callbacks asked of it; gives back the emptied vector of last time.
pub(super) fn take_local(into: &mut Vec<Command>) {
    HERE.with_borrow_mut(|here| {
        if let Some(here) = here {
            std::mem::swap(&mut here.commands, into);
        }
    });
}

pub(super) fn has_local() -> bool {
    HERE.with_borrow(|here| here.as_ref().is_some_and(|h| !h.commands.is_empty()))
}

/// Whether the calling thread is one of this engine's reactors.
pub(super) fn is_reactor_of(engine: u64) -> bool {
    HERE.with_borrow(|here| here.as_ref().is_some_and(|h| h.engine == engine))
}

pub(super) fn next_engine_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Shared {
    /// What a new connection is told about us.
    pub(super) fn settings(&self, expected_task: Option<String>) -> Settings {
        let config = &self.config;
        let mut settings =
            Settings::new(&config.identity.task, &config.identity.protocol, self.incarnation, random_bytes());
        settings.cluster_id.clone_from(&config.cluster_id);
        settings.expected_task = expected_task;
        settings.secret = config.secret.as_ref().map(|s| Secret::new(s.bytes()));
        settings.keepalive_interval = config.keepalive.interval;
        settings.keepalive_timeout = config.keepalive.timeout;
        settings.limits.max_recvs = u32::try_from(config.max_inflight).unwrap_or(u32::MAX);
        settings.limits.max_call_bytes = settings.limits.max_call_bytes.min(config.max_call_bytes);
        if settings.expected_task.is_none() {
            // We serve: what the peer sends are calls. (Replies to us were asked for, and are bounded by what their
            // receivers allocate.)
            settings.limits.max_payload = config.max_call_bytes;
        }
        settings
    }

    pub(super) fn tcp_options(&self) -> TcpOptions {
        let silence = self.config.keepalive.interval + self.config.keepalive.timeout;
        TcpOptions { user_timeout: Some(silence), ..TcpOptions::default() }
    }

    /// A connection that speaks HTTP: for the control service.
    pub(super) fn serve_http(&self, fd: OwnedFd, first: Vec<u8>, name: &str, now: Instant) {
        let Some(Err(error)) = self.control.get().map(|c| c.handle(fd, first)) else { return };
        if self.offenders.is_news(&format!("HTTP {}", host_of(name)), now) {
            let line = format!(
                "starwire: refused an HTTP client on the data port, {name}: {error} (more of these from there are not logged for a minute)"
            );
            self.owner.log(Level::Warning, &line);
        }
    }

    pub fn send(&self, shard: usize, command: Command) {
        let command = HERE.with_borrow_mut(|here| match here {
            Some(h) if h.engine == self.number && h.shard == shard => {
                h.commands.push(command);
                None
            }
            _ => Some(command),
        });
        let Some(command) = command else { return };
        if self.forks != fork::count() {
            return end(
                command,
                9,
                "starwire: this process was forked from one that runs a server; a server does not work in a forked child: create it after the fork",
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

/// Where the connection of this name comes from. The port of a client says nothing, and what it calls itself is up to
/// it: one line per host.
pub(super) fn host_of(name: &str) -> &str {
    let address = name.rsplit_once(" at ").map_or(name, |(_, address)| address);
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// For handshakes: nobody may foresee them.
fn random_bytes() -> [u8; 32] {
    let mut bytes = [0; 32];
    // SAFETY: the buffer has the given length; up to 256 bytes are delivered whole once the kernel's pool is ready.
    let got = unsafe { libc::getrandom(bytes.as_mut_ptr().cast(), bytes.len(), 0) };
    if got != 32 {
        // Only kernels without the call: the file is the same source.
        if let Ok(mut file) = std::fs::File::open("/dev/urandom") {
            let _ = std::io::Read::read_exact(&mut file, &mut bytes);
        }
    }
    bytes
}

/// Ends a command that no reactor will take: nothing that was asked may stay unanswered.
pub(super) fn end(command: Command, code: i32, message: &str) {
    let outcome = Outcome::Local { code, message };
    match command {
        Command::Call { call, .. } => {
            drop(call.payload);
            call.op.done(&outcome);
        }
        Command::Recv { recv, .. } => recv.op.done(&outcome),
        Command::OpenChannel(_)
        | Command::Cancel { .. }
        | Command::Reply { .. }
        | Command::Resolved { .. }
        | Command::Addresses { .. }
        | Command::Adopt { .. }
        | Command::Stop => {}
    }
}
