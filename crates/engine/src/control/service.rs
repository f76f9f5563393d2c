//! The thread that serves HTTP.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use tokio::sync::{mpsc, watch};

use super::activity::{Activity, watched};
use super::places::{Place, Places};
use super::stream::{Replayed, Socket};
use super::{ControlAccess, ControlState, Limits, http};
use starwire_net::reactor::topology::Topology;

/// How long connections have to learn that the server stops.
const FAREWELL: Duration = Duration::from_millis(200);

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("the control service is stopped")]
    Stopped,
    #[error("the control service is disabled for this client (STARWIRE_CONTROL)")]
    NotAllowed,
    #[error("the control service already has {0} connections, the most allowed")]
    TooMany(usize),
    #[error("cannot start the thread of the control service: {0}")]
    Start(io::Error),
    #[error("the connection is closed: {0}")]
    Gone(io::Error),
}

/// The control service of one engine. Costs nothing until the first HTTP connection.
pub struct ControlService {
    state: Arc<dyn ControlState>,
    access: ControlAccess,
    limits: Limits,
    places: Arc<Places>,
    thread: Mutex<Thread>,
    /// As seen by the thread that made the engine; a reactor that starts this thread may be pinned.
    topology: Option<Topology>,
}

enum Thread {
    NotStarted,
    Running(Running),
    Stopped,
}

struct Running {
    /// After a fork the thread exists in the parent only.
    pid: u32,
    connections: mpsc::UnboundedSender<Handed>,
    join: JoinHandle<()>,
}

struct Handed {
    socket: Socket,
    first: Vec<u8>,
    place: Place,
}

impl ControlService {
    pub fn new(state: Arc<dyn ControlState>, access: ControlAccess) -> Self {
        Self::with_limits(state, access, Limits::default())
    }

    pub fn with_limits(state: Arc<dyn ControlState>, access: ControlAccess, limits: Limits) -> Self {
        Self {
            state,
            access,
            limits,
            places: Places::new(&limits),
            thread: Mutex::new(Thread::NotStarted),
            topology: Topology::detect().ok(),
        }
    }

    /// Takes over a connection that speaks HTTP. `first_bytes` were already read from it. Never blocks; on an error the
    /// connection is closed, after a reply with the reason if the client speaks HTTP/1.
    pub fn handle(&self, stream: OwnedFd, first_bytes: Vec<u8>) -> Result<(), ControlError> {
        let socket = Socket::new(stream).map_err(ControlError::Gone)?;
        let allowed = match self.access {
            ControlAccess::Everybody => true,
            ControlAccess::Loopback => socket.is_local(),
            ControlAccess::Nobody => false,
        };
        if !allowed {
            refuse(
                socket,
                &first_bytes,
                "403 Forbidden",
                "the control service is disabled for this client (STARWIRE_CONTROL)\n",
            );
            return Err(ControlError::NotAllowed);
        }
        let Some(place) = self.places.take(socket.source(), socket.is_local()) else {
            refuse(socket, &first_bytes, "503 Service Unavailable", "too many connections\n");
            return Err(ControlError::TooMany(self.places.most()));
        };
        let mut thread = self.lock();
        if matches!(*thread, Thread::NotStarted) {
            *thread = Thread::Running(self.start().map_err(ControlError::Start)?);
        }
        match &*thread {
            Thread::Running(running) => running
                .connections
                .send(Handed { socket, first: first_bytes, place })
                .map_err(|_| ControlError::Stopped),
            Thread::NotStarted | Thread::Stopped => Err(ControlError::Stopped),
        }
    }

    /// Number of open connections.
    pub fn connections(&self) -> usize {
        self.places.open()
    }

    /// Notifies watchers that the server stops, closes every connection and ends the thread. Idempotent; takes a
    /// fraction of a second at most.
    pub fn stop(&self) {
        let before = std::mem::replace(&mut *self.lock(), Thread::Stopped);
        let Thread::Running(Running { pid, connections, join }) = before else { return };
        if pid != std::process::id() {
            // In a forked child, neither the thread nor its runtime's state is ours.
            std::mem::forget((connections, join));
            return;
        }
        drop(connections);
        // The last owner may be a task on the control thread itself.
        if join.thread().id() != std::thread::current().id() {
            let _ = join.join();
        }
    }

    fn start(&self) -> io::Result<Running> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (connections, receiver) = mpsc::unbounded_channel();
        let (state, limits, topology) = (Arc::clone(&self.state), self.limits, self.topology.clone());
        let join = std::thread::Builder::new().name("starwire-control".to_owned()).spawn(move || {
            // On failure, the thread shares a CPU with a reactor.
            let _ = topology.as_ref().map(Topology::unpin_current_thread);
            runtime.block_on(serve(state, limits, receiver));
        })?;
        Ok(Running { pid: std::process::id(), connections, join })
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

fn refuse(socket: Socket, first_bytes: &[u8], status: &str, text: &str) {
    let http2 = first_bytes.starts_with(b"PRI ");
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/plain\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{text}",
        text.len()
    );
    socket.close_with(if http2 { b"" } else { answer.as_bytes() });
}

/// Serves connections until the engine drops its end of the channel.
async fn serve(state: Arc<dyn ControlState>, limits: Limits, mut connections: mpsc::UnboundedReceiver<Handed>) {
    let (serving, watch_serving) = watch::channel(true);
    let router = http::router(state, watch_serving.clone());
    let (alive, mut all_gone) = mpsc::channel::<()>(1);
    while let Some(Handed { socket, first, place }) = connections.recv().await {
        // Registering a descriptor can fail (out of memory, or the peer reset it): the connection is closed then.
        let Ok(stream) = Replayed::new(socket, first, limits.idle) else { continue };
        let (router, watch_serving, alive) = (router.clone(), watch_serving.clone(), alive.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = connection(stream, router, watch_serving, limits) => {}
                () = place.lost() => {}
            }
            drop((place, alive));
        });
    }
    // Health watchers are notified before their connections close.
    serving.send_replace(false);
    drop(alive);
    let _ = tokio::time::timeout(FAREWELL, all_gone.recv()).await;
}

async fn connection(stream: Replayed, router: Router, mut serving: watch::Receiver<bool>, limits: Limits) {
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
        .keep_alive_timeout(limits.idle / 2);
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
        let _ = tokio::time::timeout(FAREWELL, connection).await;
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
