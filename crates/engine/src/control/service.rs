//! The thread that serves HTTP.

use std::io;
use std::os::fd::OwnedFd;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use rustls::pki_types::CertificateDer;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::activity::{Activity, watched};
use super::authority::checked;
use super::grpc_proxy::{Recipient, deny_for, proxy, sort};
use super::handshakes::Handshakes;
use super::slots::{Slot, Slots};
use super::stream::{Replayed, Socket};
use super::{ControlAccess, ControlState, HttpLimits, http};
use crate::admission::Source;
use crate::port::Hidden;
use crate::tls::{self, HANDSHAKE};
use starwire_net::reactor::topology::Topology;
use starwire_net::transport::descriptors;

/// Connections that are passed on have two descriptors each, and take no more than half of what the process may have:
/// this part from other hosts, and as many from this one.
const SHARE_OF_DESCRIPTORS: usize = 8;
/// Clients at a time that are told why they may not pass: from other hosts, and as many from this one …
const DENIED: usize = 128;
/// … and for how long each.
const DENIAL: Duration = Duration::from_secs(60);
/// How long connections have to learn that the server stops.
const FAREWELL: Duration = Duration::from_millis(200);

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("the control service is stopped")]
    Stopped,
    #[error("the control service is disabled for this client (STARWIRE_CONTROL)")]
    NotAllowed,
    #[error(
        "the control service does not answer to the name {0:?}: use an address, localhost, or the task's host in the ClusterSpec"
    )]
    ForeignName(String),
    #[error("the control service already has {0} connections, the most allowed")]
    TooMany(usize),
    #[error("cannot start the thread of the control service: {0}")]
    Start(io::Error),
    #[error("the connection is closed: {0}")]
    Gone(io::Error),
    #[error("TensorFlow's gRPC is closed on this port (STARWIRE_GRPC=on opens it)")]
    NoGrpc,
    #[error("TensorFlow's gRPC is closed to clients without TLS on this port (STARWIRE_GRPC=on opens it)")]
    NoPlainGrpc,
    #[error("TensorFlow's gRPC is for tasks of the cluster, and the client's certificate is none of theirs")]
    NoMember,
    #[error("the TLS handshake of an HTTP client failed: {0}")]
    Tls(String),
}

/// TensorFlow's gRPC server behind the same port.
pub struct Behind {
    pub socket: Hidden,
    /// Clients are passed on to it …
    pub is_open: bool,
    /// … and those that have proved by TLS that they are tasks of the cluster …
    pub is_open_to_members: bool,
    /// … and those that come inside a connection of such a task.
    pub is_open_to_tunnels: bool,
}

/// The service over TLS.
pub trait Guard: Send + Sync + 'static {
    fn server(&self) -> Arc<rustls::ServerConfig>;
    /// Whether the certificate, which was verified, is that of a task of the cluster.
    fn is_member(&self, certificate: &CertificateDer<'_>) -> bool;
    /// Access of clients whose certificate was verified.
    fn access(&self) -> ControlAccess;
}

/// What is known of a client.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Client {
    Plain,
    /// Its certificate was verified; is it a task's?
    Verified {
        is_member: bool,
    },
}

/// The control service of one engine. Costs nothing until the first HTTP connection.
pub struct ControlService {
    gate: Arc<Gate>,
    thread: Mutex<Thread>,
    /// As seen by the thread that made the engine; a reactor that starts this thread may be pinned.
    topology: Option<Topology>,
}

/// Who may come in.
struct Gate {
    state: Arc<dyn ControlState>,
    access: ControlAccess,
    guard: Option<Arc<dyn Guard>>,
    limits: HttpLimits,
    slots: Arc<Slots>,
    handshakes: Handshakes,
    /// None once the service is stopped: the engine may be kept longer.
    behind: Mutex<Option<Arc<Behind>>>,
    /// Of connections that are passed on, or may be …
    grpc_proxy: Arc<Slots>,
    /// … and of those that are not, as their clients may not pass.
    denied: Arc<Slots>,
}

enum Thread {
    NotStarted,
    Running(Running),
    Stopped,
}

struct Running {
    /// After a fork the thread exists in the parent only.
    pid: u32,
    work: mpsc::UnboundedSender<Work>,
    join: JoinHandle<()>,
}

/// For the thread.
enum Work {
    Client(Handed),
    /// Ends with the service, wherever it is.
    Task(Pin<Box<dyn Future<Output = ()> + Send>>),
}

struct Handed {
    socket: Socket,
    first: Vec<u8>,
    place: Slot,
    /// It may be for TensorFlow.
    unsorted: bool,
}

impl ControlService {
    pub fn new(state: Arc<dyn ControlState>, access: ControlAccess) -> Self {
        Self::with_limits(state, access, HttpLimits::default())
    }

    pub fn with_limits(state: Arc<dyn ControlState>, access: ControlAccess, limits: HttpLimits) -> Self {
        Self::in_front(None, None, state, access, limits)
    }

    /// With TensorFlow's gRPC server behind the same port, and TLS. `access` is that of clients without.
    pub fn in_front(
        behind: Option<Behind>,
        guard: Option<Arc<dyn Guard>>,
        state: Arc<dyn ControlState>,
        access: ControlAccess,
        limits: HttpLimits,
    ) -> Self {
        let most = descriptors::allowed() / SHARE_OF_DESCRIPTORS;
        let grpc_proxy = Slots::new(&HttpLimits { connections: most, local: most, ..limits });
        Self {
            gate: Arc::new(Gate {
                state,
                access,
                guard,
                limits,
                slots: Slots::new(&limits),
                handshakes: Handshakes::new(),
                behind: Mutex::new(behind.map(Arc::new)),
                grpc_proxy,
                denied: Slots::new(&HttpLimits { connections: DENIED, local: DENIED, ..limits }),
            }),
            thread: Mutex::new(Thread::NotStarted),
            topology: Topology::detect().ok(),
        }
    }

    /// Takes over a connection that speaks HTTP. `first_bytes` were already read from it. Never blocks; on an error the
    /// connection is closed, after a reply with the reason if the client speaks HTTP/1.
    pub fn handle(&self, stream: OwnedFd, first_bytes: Vec<u8>) -> Result<(), ControlError> {
        let socket = Socket::new(stream).map_err(ControlError::Gone)?;
        let (source, is_local) = (socket.source(), socket.is_local());
        let is_tls = first_bytes.first() == Some(&HANDSHAKE);
        let behind = self.gate.behind().filter(|_| !is_tls && first_bytes.starts_with(b"PRI "));
        let unsorted = behind.is_some();
        let admitted = if is_tls {
            // Who it is comes later.
            self.gate.acquire(source, is_local)
        } else if let Some(behind) = behind {
            self.gate.pass(&behind, source, is_local, Client::Plain)
        } else {
            self.gate.admit(source, is_local, Client::Plain)
        };
        let place = match admitted {
            Ok(place) => place,
            Err(error) => {
                refuse(socket, &first_bytes, &error);
                return Err(error);
            }
        };
        self.give(Work::Client(Handed { socket, first: first_bytes, place, unsorted }))
    }

    /// Runs something on the service's thread, until it ends or the service does.
    pub fn run(&self, task: impl Future<Output = ()> + Send + 'static) -> Result<(), ControlError> {
        self.give(Work::Task(Box::pin(task)))
    }

    /// TensorFlow's gRPC server, if it is behind this port.
    pub fn behind(&self) -> Option<Arc<Behind>> {
        self.gate.behind()
    }

    fn give(&self, work: Work) -> Result<(), ControlError> {
        let mut thread = self.lock();
        if matches!(*thread, Thread::NotStarted) {
            *thread = Thread::Running(self.start().map_err(ControlError::Start)?);
        }
        match &*thread {
            Thread::Running(running) => running.work.send(work).map_err(|_| ControlError::Stopped),
            Thread::NotStarted | Thread::Stopped => Err(ControlError::Stopped),
        }
    }

    /// Number of open connections.
    pub fn connections(&self) -> usize {
        self.gate.slots.open()
    }

    /// Notifies watchers that the server stops, closes every connection and ends the thread. Idempotent; takes a
    /// fraction of a second at most.
    pub fn stop(&self) {
        let before = std::mem::replace(&mut *self.lock(), Thread::Stopped);
        *self.gate.behind.lock().unwrap_or_else(PoisonError::into_inner) = None;
        let Thread::Running(Running { pid, work, join }) = before else { return };
        if pid != std::process::id() {
            // In a forked child, neither the thread nor its runtime's state is ours.
            std::mem::forget((work, join));
            return;
        }
        drop(work);
        // The last owner may be a task on the control thread itself.
        if join.thread().id() != std::thread::current().id() {
            let _ = join.join();
        }
    }

    fn start(&self) -> io::Result<Running> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (work, receiver) = mpsc::unbounded_channel();
        let (gate, topology) = (Arc::clone(&self.gate), self.topology.clone());
        let join = std::thread::Builder::new().name("starwire-control".to_owned()).spawn(move || {
            // On failure, the thread shares a CPU with a reactor.
            let _ = topology.as_ref().map(Topology::unpin_current_thread);
            runtime.block_on(serve(gate, receiver));
        })?;
        Ok(Running { pid: std::process::id(), work, join })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Thread> {
        self.thread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ControlService {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Gate {
    fn behind(&self) -> Option<Arc<Behind>> {
        self.behind.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether TensorFlow's gRPC is open to this client.
    fn passes(&self, behind: &Behind, client: Client) -> Result<(), ControlError> {
        match client {
            _ if behind.is_open => Ok(()),
            Client::Verified { is_member: true } if behind.is_open_to_members => Ok(()),
            Client::Verified { .. } if behind.is_open_to_members => Err(ControlError::NoMember),
            Client::Plain if behind.is_open_to_members => Err(ControlError::NoPlainGrpc),
            _ => Err(ControlError::NoGrpc),
        }
    }

    /// A place for a client of TensorFlow's gRPC, or for one that may be.
    fn pass(&self, behind: &Behind, source: Source, is_local: bool, client: Client) -> Result<Slot, ControlError> {
        let slots = if self.passes(behind, client).is_ok() { &self.grpc_proxy } else { &self.denied };
        slots.acquire(source, is_local).ok_or_else(|| ControlError::TooMany(slots.most(is_local)))
    }

    /// A place for a client of the control service.
    fn admit(&self, source: Source, is_local: bool, client: Client) -> Result<Slot, ControlError> {
        self.allow(is_local, client)?;
        self.acquire(source, is_local)
    }

    fn allow(&self, is_local: bool, client: Client) -> Result<(), ControlError> {
        let access = match (client, &self.guard) {
            (Client::Verified { .. }, Some(guard)) => guard.access(),
            _ => self.access,
        };
        let allowed = match access {
            ControlAccess::Everybody => true,
            ControlAccess::Loopback => is_local,
            ControlAccess::Nobody => false,
        };
        if allowed { Ok(()) } else { Err(ControlError::NotAllowed) }
    }

    fn acquire(&self, source: Source, is_local: bool) -> Result<Slot, ControlError> {
        self.slots.acquire(source, is_local).ok_or_else(|| ControlError::TooMany(self.slots.most(is_local)))
    }
}

/// The TLS handshake of an HTTP client.
async fn shake_hands(guard: &dyn Guard, stream: Replayed) -> Result<(TlsStream<Replayed>, Client), ControlError> {
    let failed = |error: io::Error| {
        let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<rustls::Error>());
        ControlError::Tls(inner.map_or_else(|| error.to_string(), tls::explain))
    };
    let stream = TlsAcceptor::from(guard.server()).accept(stream).await.map_err(failed)?;
    let certificate = stream.get_ref().1.peer_certificates().and_then(|chain| chain.first());
    let client = Client::Verified { is_member: certificate.is_some_and(|certificate| guard.is_member(certificate)) };
    Ok((stream, client))
}

fn refuse(socket: Socket, first_bytes: &[u8], error: &ControlError) {
    // Neither HTTP/2 nor TLS begins with words.
    let http1 = first_bytes.first().is_some_and(u8::is_ascii_uppercase) && !first_bytes.starts_with(b"PRI ");
    let (status, text) = match error {
        ControlError::NotAllowed => {
            ("403 Forbidden", "the control service is disabled for this client (STARWIRE_CONTROL)\n")
        }
        _ => ("503 Service Unavailable", "too many connections\n"),
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    );
    socket.close_with(if http1 { answer.as_bytes() } else { b"" });
}

/// Serves connections until the engine drops its end of the channel.
async fn serve(gate: Arc<Gate>, mut work: mpsc::UnboundedReceiver<Work>) {
    let (serving, watch_serving) = watch::channel(true);
    let router = http::router(Arc::clone(&gate.state), watch_serving.clone());
    let (alive, mut all_gone) = mpsc::channel::<()>(1);
    while let Some(next) = work.recv().await {
        let handed = match next {
            Work::Client(handed) => handed,
            Work::Task(task) => {
                tokio::spawn(task);
                continue;
            }
        };
        let (gate, router, watch_serving, alive) = (gate.clone(), router.clone(), watch_serving.clone(), alive.clone());
        tokio::spawn(async move {
            // Errors of a client's connection are the client's.
            let _ = welcome(gate, handed, router, watch_serving).await;
            drop(alive);
        });
    }
    // Health watchers are notified before their connections close.
    serving.send_replace(false);
    drop(alive);
    let _ = timeout(FAREWELL, all_gone.recv()).await;
}

/// Serves a connection, or passes it on, until it ends or its place is needed.
async fn welcome(
    gate: Arc<Gate>,
    handed: Handed,
    router: Router,
    mut serving: watch::Receiver<bool>,
) -> io::Result<()> {
    let Handed { socket, mut first, mut place, mut unsorted } = handed;
    let (name, source, is_local) = (socket.name(), socket.source(), socket.is_local());
    let (mut client, mut unwrapped) = (Client::Plain, None);
    let is_tls = first.first() == Some(&HANDSHAKE);
    let socket = match gate.guard.as_ref().filter(|_| is_tls) {
        None => Some(socket),
        Some(guard) => {
            let stream = Replayed::new(socket, std::mem::take(&mut first), gate.limits.idle)?;
            let shaken = gate.handshakes.run(shake_hands(&**guard, stream), || gate.state.handshake_delayed());
            let accepted = tokio::select! {
                accepted = timeout(gate.limits.idle, shaken) => accepted?,
                () = place.lost() => return Ok(()),
            };
            let (stream, found) = accepted.map_err(|error| {
                gate.state.refused(&name, &error);
                io::Error::other(error)
            })?;
            unsorted = gate.behind().is_some() && stream.get_ref().1.alpn_protocol() == Some(b"h2");
            if !unsorted {
                gate.allow(is_local, found)
                    .inspect_err(|error| gate.state.refused(&name, error))
                    .map_err(io::Error::other)?;
            }
            client = found;
            unwrapped = Some(Replayed::over_tls(stream, gate.limits.idle));
            None
        }
    };
    let plain = socket.map(|socket| Replayed::new(socket, Vec::new(), gate.limits.idle)).transpose()?;
    let Some(mut stream) = plain.or(unwrapped) else { return Ok(()) };
    let stream = match gate.behind().filter(|_| unsorted) {
        None => stream.replay(first),
        Some(behind) => {
            let recipient = tokio::select! {
                recipient = timeout(gate.limits.idle, sort(&mut stream, &mut first)) => recipient??,
                () = place.lost() => return Ok(()),
            };
            if recipient == Recipient::TensorFlow {
                if is_tls {
                    place = gate.pass(&behind, source, is_local, client).map_err(io::Error::other)?;
                }
                let stream = stream.replay(first);
                let served = async {
                    match gate.passes(&behind, client) {
                        Ok(()) => {
                            gate.state.passed_on();
                            proxy(stream.patient(), &behind.socket).await
                        }
                        Err(error) => {
                            gate.state.refused(&name, &error);
                            deny_for(DENIAL, stream, &error.to_string()).await
                        }
                    }
                };
                return tokio::select! {
                    served = served => served,
                    () = place.lost() => Ok(()),
                    stopped = serving.wait_for(|serving| !serving) => stopped.map(drop).map_err(io::Error::other),
                };
            }
            place = match gate.admit(source, is_local, client) {
                Ok(place) => place,
                Err(error) => {
                    gate.state.refused(&name, &error);
                    return Ok(());
                }
            };
            stream.replay(first)
        }
    };
    let router = checked(router, &gate.state, &name);
    tokio::select! {
        () = connection(stream, router, serving, gate.limits) => {}
        () = place.lost() => {}
    }
    Ok(())
}

async fn connection(stream: Replayed, router: Router, mut serving: watch::Receiver<bool>, limits: HttpLimits) {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.idle)
        .max_buf_size((limits.header as usize).max(8192));
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(limits.header)
        .max_concurrent_streams(16)
        .keep_alive_interval(limits.idle / 3)
        .keep_alive_timeout(limits.pong);
    let activity = Arc::new(Activity::default());
    let service = TowerToHyperService::new(watched(router, &activity));
    let connection = builder.serve_connection(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let has_rested = tokio::select! {
        // Errors of a client's connection are the client's.
        _ = &mut connection => return,
        () = async { drop(serving.wait_for(|serving| !serving).await) } => false,
        () = rests(&activity, limits.idle) => true,
    };
    connection.as_mut().graceful_shutdown();
    if has_rested {
        let _ = timeout(FAREWELL, connection).await;
    } else {
        // Open streams may end by themselves: watchers receive their last reply.
        let _ = connection.await;
    }
}

/// Ends when no request was in flight for a while.
async fn rests(activity: &Activity, idle: Duration) {
    let mut before = None;
    loop {
        tokio::time::sleep(idle).await;
        let now = activity.resting_at();
        if now.is_some() && now == before {
            return;
        }
        before = now;
    }
}

#[cfg(test)]
mod tests {
    use super::super::ServerFacts;
    use super::*;
    use crate::config::testing::TempDir;
    use crate::config::{MapEnv, Setting};
    use crate::metrics::{ConnectionFacts, PeerFacts, Sample};
    use crate::port::Named;
    use std::os::unix::net::UnixListener;

    struct Silent;

    impl ControlState for Silent {
        fn passed_on(&self) {}

        fn handshake_delayed(&self) {}

        fn refused(&self, _client: &str, _why: &ControlError) {}

        fn answers_to(&self, _authority: &str) -> bool {
            false
        }

        fn server(&self) -> ServerFacts {
            ServerFacts::default()
        }

        fn metrics(&self) -> Vec<Sample> {
            Vec::new()
        }

        fn connections(&self) -> Vec<ConnectionFacts> {
            Vec::new()
        }

        fn peers(&self) -> Vec<PeerFacts> {
            Vec::new()
        }

        fn settings(&self) -> Vec<Setting> {
            Vec::new()
        }
    }

    #[test]
    fn clients_that_may_not_pass_take_no_place_of_those_that_may() {
        let (state, limits) = (Arc::new(Silent), HttpLimits::default());
        let service = ControlService::in_front(None, None, state, ControlAccess::Everybody, limits);
        let folder = TempDir::new("pass");
        let named = Named::new(&MapEnv::new("/").set("TMPDIR", folder.path())).unwrap();
        let _listener = UnixListener::bind(named.path()).unwrap();
        let socket = named.hide().unwrap();
        let mut behind = Behind { socket, is_open: false, is_open_to_members: false, is_open_to_tunnels: false };
        let acquire = |behind: &Behind, n| service.gate.pass(behind, Source::V4([10, 0, 0, n]), false, Client::Plain);
        let denied: Vec<_> = (0..=255).filter_map(|n| acquire(&behind, n).ok()).collect();
        assert_eq!(service.gate.grpc_proxy.open(), 0);
        assert_eq!(denied.len(), 2 * DENIED);
        assert!(matches!(acquire(&behind, 0), Err(ControlError::TooMany(most)) if most == 2 * DENIED));
        behind.is_open = true;
        let passes = acquire(&behind, 0).unwrap();
        assert_eq!(service.gate.grpc_proxy.open(), 1);
        drop((denied, passes));
    }

    /// Each connection that is passed on has two.
    #[test]
    fn clients_of_other_hosts_have_a_quarter_of_the_descriptors() {
        let (state, limits) = (Arc::new(Silent), HttpLimits::default());
        let service = ControlService::in_front(None, None, state, ControlAccess::Everybody, limits);
        // As many are for this host, and each place may have a connection that has lost it and not ended.
        let places = service.gate.grpc_proxy.most(false) / 2;
        let quarter = descriptors::allowed() / 4;
        assert!((quarter - 1..=quarter).contains(&(2 * places)), "{places} {quarter}");
    }
}
