//! One TensorFlow server's transport: starts the reactors, opens channels, answers requests, stops.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::admission::{Admission, Listener};
use crate::api::OutPayload;
use crate::api::{Host, Level, Ticket};
use crate::channel::{Channel, Channels};
use crate::command::{Command, Meta, StarCommand};
use crate::config::{
    Config, DriverChoice, Env, HostPort, Identity, Ports, Running, TransportChoice, UnixSockets, is_loopback,
};
use crate::control::{Behind, ControlService, HttpLimits};
use crate::error::EngineError;
use crate::keys::shard_of;
use crate::links::Services;
use crate::metrics::render_prometheus;
use crate::peers::Peer;
use crate::port::{self, Hidden, Port};
use crate::shard::Shard;
use crate::shared::{self, Shared};
use crate::star::{StarHost, StarOutcome, StateThread};
use crate::system::exit::Freeze;
use crate::system::{exit, fork};
use crate::tunnel::{Destination, TunnelListeners};
use crate::{http_guard, observe};
use starwire_net::reactor::driver::Driver;
use starwire_net::reactor::epoll::EpollDriver;
use starwire_net::reactor::error::DriverError;
use starwire_net::reactor::mailbox::{EventWaker, Sender, mailbox};
use starwire_net::reactor::uring::UringDriver;
use starwire_net::reactor::verbs::VerbsDriver;
use starwire_net::transport::{TransportError, descriptors, unix};

/// Between two looks whether a reactor has ended.
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

pub struct Engine<H: Host> {
    shared: Arc<Shared<H>>,
    services: Services<H>,
    channels: Mutex<Channels>,
    tunnel_listeners: TunnelListeners,
    threads: Mutex<Vec<JoinHandle<()>>>,
    state: Mutex<Option<StateThread>>,
    banner: String,
    bound: SocketAddr,
}

impl<H: Host> Engine<H> {
    /// Reads the environment, binds the data port unless there is a `port`, starts the reactors.
    pub fn start(
        env: &dyn Env,
        identity: Identity,
        incarnation: u64,
        host: H,
        port: Option<Port>,
    ) -> Result<Arc<Self>, EngineError> {
        fork::watch();
        let config = Config::from_env(env, identity)?;
        for warning in &config.warnings {
            host.log(Level::Warning, warning);
        }
        let (listener, bound, hidden) = match port {
            Some(Port { listener, bound, grpc }) => (listener, bound, Some(grpc.hide()?)),
            None => port::listen(&config).map(|(listener, bound)| (listener, bound, None))?,
        };
        Self::start_with(config, incarnation, host, Some(Listening { listener, bound, hidden }))
    }

    /// An engine that listens nowhere: it only connects.
    pub(crate) fn start_client(config: Config, incarnation: u64, host: H) -> Result<Arc<Self>, EngineError> {
        fork::watch();
        Self::start_with(config, incarnation, host, None)
    }

    fn start_with(
        config: Config,
        incarnation: u64,
        host: H,
        listening: Option<Listening>,
    ) -> Result<Arc<Self>, EngineError> {
        let (listener, bound, hidden) = match listening {
            Some(Listening { listener, bound, hidden }) => (Some(listener), bound, hidden),
            None => (None, SocketAddr::from(([127, 0, 0, 1], 0)), None),
        };
        if config.secret.is_none() && config.tls.is_none() && !bound.ip().is_loopback() {
            let what = if config.ports == Ports::One { "" } else { " or TensorFlow's gRPC port" };
            let line = format!(
                "starwire: whoever can reach {bound}{what} can run code here: only this cluster's own tasks should be able to (STARWIRE_PORTS=one with STARWIRE_TLS_CERT or STARWIRE_SECRET_FILE keeps others out)"
            );
            host.log(Level::Warning, &line);
        }
        let local = (config.unix != UnixSockets::Off && listener.is_some()).then(|| listen_locally(bound));
        if let Some(Err(error)) = &local {
            host.log(Level::Warning, &format!("starwire: tasks on this host will connect over TCP: {error}"));
        }
        let local = local.and_then(Result::ok);
        let shared = Arc::new(Shared::new(config, host, incarnation));
        let services = Services::new(&shared).map_err(EngineError::State)?;
        let reactors = Reactors::start(&shared, &services)?;
        let mut listeners: Vec<_> = listener.into_iter().map(|fd| (fd, Listener::Tcp)).collect();
        listeners.extend(local.map(|fd| (fd, Listener::Unix)));
        let driver = reactors.driver.clone();
        let banner = shared.config.banner(Running { driver: &driver, bound });
        let view = observe::View::new(&shared, banner.clone());
        let behind = hidden.map(|socket| Behind {
            socket,
            is_open: shared.config.passes_grpc,
            is_open_to_members: shared.config.passes_members,
            is_open_to_tunnels: shared.config.passes_tunnels,
        });
        let guard = http_guard::guard(&shared);
        let access = shared.config.control;
        let control = ControlService::in_front(behind, guard, Arc::new(view), access, HttpLimits::default());
        let _ = shared.control.set(control);
        // Before the reactors: once these run, an error would leave them with callbacks into what the caller frees.
        let state = services.star.as_ref().and_then(|star| StateThread::start(star, &shared.unfinished)).transpose()?;
        let threads = match reactors.go(&shared, listeners) {
            Ok(threads) => threads,
            Err(error) => {
                state.into_iter().for_each(|state| state.stop(false));
                return Err(error);
            }
        };
        let (channels, tunnel_listeners) = (Mutex::default(), TunnelListeners::default());
        let (threads, state) = (Mutex::new(threads), Mutex::new(state));
        let engine = Arc::new(Self { shared, services, channels, tunnel_listeners, threads, state, banner, bound });
        let watched: Weak<Self> = Arc::downgrade(&engine);
        exit::watch(watched);
        Ok(engine)
    }

    pub fn banner(&self) -> &str {
        &self.banner
    }

    /// Where the data port listens.
    pub fn bound(&self) -> SocketAddr {
        self.bound
    }

    /// After this long without a connection to its task, a session may be deleted.
    pub fn session_idle(&self) -> Duration {
        self.shared.config.star.plans.session_idle
    }

    /// Opens a channel to a task. The same task always gets the same channel.
    pub fn channel(&self, task: &str, grpc_address: &str) -> Result<Channel<H>, EngineError> {
        if self.shared.forks != fork::count() {
            return Err(EngineError::Forked);
        }
        let data = self.shared.config.data_address(task, grpc_address)?;
        let peer = Peer { task: task.into(), grpc_address: grpc_address.into(), data, has_joined: false };
        self.channels().open(&self.shared, peer)
    }

    /// Opens a channel to a task that has joined. It ends when the task is back at another address.
    pub fn channel_to_joined(&self, task: &str) -> Result<Channel<H>, EngineError> {
        self.channels().open_to_joined(&self.shared, task)
    }

    /// Where TensorFlow's gRPC of this process has to connect, with a secret or TLS, to reach the server of the task
    /// with this address in the ClusterSpec: an address of this process, from where it goes through the connection to
    /// the task. None: to the task itself.
    pub fn tunnel_address(&self, grpc_address: &str) -> Result<Option<SocketAddr>, EngineError> {
        let config = &self.shared.config;
        if !config.tunnels {
            return Ok(None);
        }
        let to = if self.is_own(grpc_address) {
            Destination::Own
        } else {
            let tasks = &config.identity.tasks;
            let Some((task, _)) = tasks.iter().find(|(_, address)| address == grpc_address) else { return Ok(None) };
            Destination::Task(self.channel(task, grpc_address)?)
        };
        self.tunnel_listeners.open(&self.shared, grpc_address, to).map(Some).map_err(EngineError::TunnelListener)
    }

    /// TensorFlow calls the own task by its entry of the ClusterSpec, or localhost with the port.
    fn is_own(&self, grpc_address: &str) -> bool {
        let own = &self.shared.config.identity.grpc_address;
        let has_own_port = |address: &HostPort| own.parse().is_ok_and(|own: HostPort| own.port == address.port);
        grpc_address == own
            || grpc_address.parse().is_ok_and(|given: HostPort| is_loopback(&given.host) && has_own_port(&given))
    }

    /// Answers a peer's request.
    pub fn reply(&self, ticket: Ticket, code: i32, meta: &[u8], payload: Option<OutPayload>) {
        let shard = shard_of(ticket.conn);
        self.shared
            .send(shard, Command::Reply { conn: ticket.conn, id: ticket.id, code, meta: Meta::of(meta), payload });
    }

    /// Ends every call, closes every connection, joins every thread. Called from a reactor, it does not wait for that
    /// reactor.
    pub fn stop(&self) {
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        if self.shared.forks != fork::count() {
            // The threads belong to the parent.
            std::mem::forget(threads);
            std::mem::forget(self.state.lock().unwrap_or_else(PoisonError::into_inner).take());
            return;
        }
        let is_reactor = shared::is_reactor_of(self.shared.number);
        // Its end may take seconds, for which an exit of the process must not wait.
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(state) = state {
            state.stop(is_reactor);
        }
        for shard in 0..self.shared.config.reactors {
            self.shared.send(shard, Command::Stop);
        }
        if !is_reactor {
            threads.into_iter().for_each(|thread| self.join(thread));
        }
        if let Some(control) = self.shared.control.get() {
            control.stop();
        }
    }

    /// Waits for the end of a reactor, or the freeze of all: these end with the process.
    fn join(&self, thread: JoinHandle<()>) {
        let mut pause = Duration::from_micros(50);
        while !thread.is_finished() {
            if self.shared.frozen.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(pause);
            pause = (2 * pause).min(LONGEST_PAUSE);
        }
        let _ = thread.join();
    }

    /// The owner's [`Host::star`].
    pub fn star_host(&self) -> Option<&H::Star> {
        self.shared.host.star()
    }

    /// Ends a call that [`crate::star::StarHost::run`] was given.
    pub fn star_done(&self, ticket: Ticket, outcome: StarOutcome<<H::Star as StarHost>::Value>) {
        let command = Command::Star(Box::new(StarCommand::Done { ticket, outcome }));
        self.shared.send(shard_of(ticket.conn), command);
    }

    /// The session was deleted: drops its plans.
    pub fn star_session_closed(&self, session: &[u8]) {
        if let Some(star) = &self.services.star {
            star.session_closed(session);
        }
    }

    /// Calls `then` at once, or when all that has changed by now is in the server's state if that is synchronous. With
    /// false: the server has stopped before.
    pub fn when_written(&self, then: Box<dyn FnOnce(bool) + Send>) {
        match &self.services.star {
            Some(star) => star.when_written(then),
            None => then(true),
        }
    }

    /// Drops all plans.
    pub fn star_forget_plans(&self) {
        if let Some(star) = &self.services.star {
            star.forget_plans();
        }
    }

    fn channels(&self) -> MutexGuard<'_, Channels> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reply was sent that carries this many tensors as one.
    pub fn count_fused(&self, tensors: u64) {
        self.shared.metrics.count(|cells| {
            cells.fused_messages_sent.add(1);
            cells.fused_tensors_sent.add(tensors);
        });
    }

    pub fn metrics_text(&self) -> String {
        let identity = &self.shared.config.identity;
        render_prometheus(
            &self.shared.metrics.snapshot(),
            &[("protocol", identity.protocol.name()), ("task", &identity.task)],
        )
    }
}

impl<H: Host> Freeze for Engine<H> {
    fn freeze(&self) {
        self.shared.frozen.store(true, Ordering::Release);
        for sender in self.shared.senders.get().into_iter().flatten() {
            sender.wake();
        }
        if let Some(state) = &*self.state.lock().unwrap_or_else(PoisonError::into_inner) {
            state.wake();
        }
    }

    fn is_frozen(&self) -> bool {
        self.shared.forks != fork::count() || Arc::strong_count(&self.shared.callbacks) == 1
    }

    fn leave(&self) {
        self.shared.leaving.store(true, Ordering::Release);
    }

    fn is_running(&self) -> bool {
        self.shared.forks == fork::count() && Arc::strong_count(&self.shared.unfinished) > 1
    }
}

impl<H: Host> Drop for Engine<H> {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Where an engine listens.
struct Listening {
    listener: OwnedFd,
    bound: SocketAddr,
    /// TensorFlow's gRPC server behind it.
    hidden: Option<Hidden>,
}

/// A unix socket for peers on this host, beside the data port.
fn listen_locally(bound: SocketAddr) -> Result<OwnedFd, TransportError> {
    unix::listen_at(&unix::beside(bound))
}

/// Reactor threads that have their driver and wait for each other.
struct Reactors<H: Host> {
    driver: String,
    senders: Vec<Sender<Command<H>>>,
    starters: Vec<mpsc::Sender<Vec<(OwnedFd, Listener)>>>,
    threads: Vec<JoinHandle<()>>,
}

impl<H: Host> Reactors<H> {
    fn start(shared: &Arc<Shared<H>>, services: &Services<H>) -> Result<Self, EngineError> {
        let mut made = Self { driver: String::new(), senders: Vec::new(), starters: Vec::new(), threads: Vec::new() };
        for index in 0..shared.config.reactors {
            let (told, tell) = mpsc::channel();
            let (starter, start) = mpsc::channel::<Vec<(OwnedFd, Listener)>>();
            let (shared, services) = (shared.clone(), services.clone());
            let thread = std::thread::Builder::new().name(format!("starwire-{index}")).spawn(move || {
                reactor(index, &shared, services, &told, &start);
            });
            made.threads.push(thread.map_err(|source| EngineError::Thread { index, source })?);
            let (driver, sender) = tell.recv().unwrap_or(Err(EngineError::Died { index }))?;
            made.driver = driver;
            made.senders.push(sender);
            made.starters.push(starter);
        }
        Ok(made)
    }

    fn go(self, shared: &Shared<H>, listeners: Vec<(OwnedFd, Listener)>) -> Result<Vec<JoinHandle<()>>, EngineError> {
        let _ = shared.senders.set(self.senders);
        let mut listeners = Some(listeners);
        for (index, starter) in self.starters.iter().enumerate() {
            starter.send(listeners.take().unwrap_or_default()).map_err(|_| EngineError::Died { index })?;
        }
        Ok(self.threads)
    }
}

type Told<H> = Result<(String, Sender<Command<H>>), EngineError>;

/// The most unauthenticated connections of a server, through each kind of listener …
const MOST: usize = 4096;
/// … but no more than this part of the descriptors that the process may have, as sessions and files need some as well …
const SHARE_OF_DESCRIPTORS: usize = 4;
/// … and no fewer than this on each reactor.
const LEAST: usize = 16;

/// The most unauthenticated connections of one of `reactors` reactors, through each kind of listener.
fn unauthenticated_limit(reactors: usize) -> usize {
    let all = MOST.min(descriptors::allowed() / SHARE_OF_DESCRIPTORS);
    (all / reactors.max(1)).max(LEAST)
}

/// A reactor thread, from the choice of its driver to its end.
fn reactor<H: Host>(
    index: usize,
    shared: &Arc<Shared<H>>,
    services: Services<H>,
    told: &mpsc::Sender<Told<H>>,
    start: &mpsc::Receiver<Vec<(OwnedFd, Listener)>>,
) {
    let made = make_driver(shared).map_err(|source| EngineError::Driver { index, source });
    let made = made.and_then(|driver| with_pairs(index, shared, driver)).and_then(|driver| {
        let waker = EventWaker::of(&*driver);
        let waker = waker.map_err(|error| EngineError::Driver { index, source: DriverError::Epoll(error) })?;
        let (sender, mailbox) = mailbox(waker);
        Ok((driver, sender, mailbox))
    });
    let (driver, sender, mailbox) = match made {
        Ok(made) => made,
        Err(error) => {
            let _ = told.send(Err(error));
            return;
        }
    };
    if told.send(Ok((driver.name().into(), sender))).is_err() {
        return;
    }
    // The start was cancelled: another reactor failed.
    let Ok(listeners) = start.recv() else { return };
    let mut _claim = None;
    if shared.config.pinning {
        let unknown = || Err(std::io::Error::other("the kernel does not report which CPUs exist"));
        let pinned = shared.topology.as_ref().map_or_else(unknown, |t| t.pin_current_thread_apart(index));
        match pinned {
            Ok(claim) => _claim = claim,
            Err(error) => {
                let line = format!("starwire: cannot pin reactor {index} to a CPU: {error}");
                shared.host.log(Level::Warning, &line);
            }
        }
    }
    let admission = Admission::new(unauthenticated_limit(shared.config.reactors), Instant::now());
    let mut shard = Shard::new(index, shared.clone(), services, driver, mailbox, admission);
    for (fd, listener) in listeners {
        if let Err(error) = shard.listen(fd, listener) {
            shared.host.log(Level::Error, &format!("starwire: cannot accept connections: {error}"));
        }
    }
    if catch_unwind(AssertUnwindSafe(|| shard.run())).is_err() {
        let line = format!("starwire: internal error: reactor {index} ended; its connections are closed");
        shared.host.log(Level::Error, &line);
        // Operations in flight end here: an op reports its end when it is dropped, and the mailbox returns later
        // commands.
        let _ = catch_unwind(AssertUnwindSafe(|| shard.abandon()));
    }
}

/// Adds RDMA if it is configured. Without a usable device: TCP or an error, as configured.
fn with_pairs<H: Host>(
    index: usize,
    shared: &Shared<H>,
    driver: Box<dyn Driver>,
) -> Result<Box<dyn Driver>, EngineError> {
    let verbs = &shared.config.verbs;
    if verbs.transport == TransportChoice::Tcp {
        return Ok(driver);
    }
    match VerbsDriver::new(driver, verbs, shared.config.polling) {
        Ok(driver) => Ok(Box::new(driver)),
        Err((source, driver)) if verbs.fallback => {
            shared.metrics.recorder().verbs_fallbacks.add(1);
            if index == 0 {
                shared.host.log(Level::Warning, &format!("starwire: {source}; using TCP (STARWIRE_VERBS_FALLBACK)"));
            }
            Ok(driver)
        }
        Err((source, _)) => Err(EngineError::Verbs(source)),
    }
}

/// The configured driver, or the default.
fn make_driver<H: Host>(shared: &Shared<H>) -> Result<Box<dyn Driver>, DriverError> {
    Ok(match shared.config.driver {
        // epoll is allowed everywhere (many containers forbid io_uring), and is as fast for small messages.
        DriverChoice::Auto | DriverChoice::Epoll => Box::new(EpollDriver::new().map_err(DriverError::Epoll)?),
        DriverChoice::IoUring => Box::new(UringDriver::new()?),
    })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const NAME: &str = "engine::tests::unauthenticated_connections_have_a_quarter_of_the_descriptors";

    /// The number of descriptors is limited per process: the test runs again in others.
    #[test]
    fn unauthenticated_connections_have_a_quarter_of_the_descriptors() {
        if let Ok(expected) = std::env::var("EXPECTED_LIMITS") {
            assert_eq!(format!("{:?}", [1, 4, 1000].map(unauthenticated_limit)), expected);
            return;
        }
        for (descriptors, expected) in [(40, [16, 16, 16]), (400, [100, 25, 16]), (20_000, [4096, 1024, 16])] {
            let limited = format!("ulimit -Sn {descriptors} && exec \"$0\" --exact {NAME}");
            let mut child = Command::new("sh");
            child.arg("-c").arg(limited).arg(std::env::current_exe().unwrap());
            let output = child.env("EXPECTED_LIMITS", format!("{expected:?}")).output().unwrap();
            let text = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && text.contains("1 passed"), "{descriptors}: {text}");
        }
    }
}
