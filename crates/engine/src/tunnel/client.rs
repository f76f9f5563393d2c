//! The client side of tunnels: listeners for the gRPC clients of this process.

use std::collections::HashMap;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::spawn_blocking;
use tokio::time::sleep;

use crate::api::PendingOp;
use crate::api::{Host, Level};
use crate::channel::Channel;
use crate::command::NewCall;
use crate::control::grpc_proxy;
use crate::shared::Shared;
use starwire_net::transport::loopback;
use starwire_protocol::tunnel::{MOST_CARRIED, Request, TUNNEL, write};
use starwire_protocol::{Failure, Outcome, code};

/// After a connection could not be accepted.
const PAUSE: Duration = Duration::from_millis(50);

/// The listeners of this process.
#[derive(Default)]
pub struct TunnelListeners {
    /// By the address in the ClusterSpec.
    open: Mutex<HashMap<String, SocketAddr>>,
    next_stream: Arc<AtomicU64>,
}

/// The server that a listener forwards to.
pub enum Destination<H: Host> {
    Task(Channel<H>),
    /// To the server of this process.
    Own,
}

impl<H: Host> Clone for Destination<H> {
    fn clone(&self) -> Self {
        match self {
            Self::Task(channel) => Self::Task(channel.clone()),
            Self::Own => Self::Own,
        }
    }
}

impl TunnelListeners {
    /// Returns the address of the listener for the task with this address, which it opens if there is none.
    pub fn open<H: Host>(
        &self,
        shared: &Arc<Shared<H>>,
        grpc_address: &str,
        to: Destination<H>,
    ) -> io::Result<SocketAddr> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = open.get(grpc_address) {
            return Ok(*at);
        }
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        listener.set_nonblocking(true)?;
        let at = listener.local_addr()?;
        let control = shared.control.get().ok_or(io::ErrorKind::NotConnected)?;
        control
            .run(serve(listener, at, to, Arc::downgrade(shared), self.next_stream.clone()))
            .map_err(io::Error::other)?;
        open.insert(grpc_address.to_owned(), at);
        Ok(at)
    }
}

async fn serve<H: Host>(
    listener: std::net::TcpListener,
    at: SocketAddr,
    to: Destination<H>,
    shared: Weak<Shared<H>>,
    next_stream: Arc<AtomicU64>,
) {
    let Ok(listener) = TcpListener::from_std(listener) else { return };
    loop {
        let Ok((client, from)) = listener.accept().await else {
            sleep(PAUSE).await;
            continue;
        };
        let Some(shared) = shared.upgrade() else { return };
        // It reads a table of all connections of the host, for which nothing else here may wait.
        let is_ours = spawn_blocking(move || loopback::is_ours(from, at)).await;
        match is_ours.unwrap_or_else(|error| Err(io::Error::other(error))) {
            // Errors of a client's connection are the client's.
            Ok(true) => {
                let number = next_stream.fetch_add(1, Ordering::Relaxed);
                drop(tokio::spawn(carry(shared, client, to.clone(), number)));
            }
            Ok(false) => log_intruder(&shared, "it belongs to another user"),
            Err(error) => log_intruder(&shared, &format!("whose it is cannot be found out: {error}")),
        }
    }
}

fn log_intruder<H: Host>(shared: &Shared<H>, why: &str) {
    if shared.log_limiter.allows_event("local client of TensorFlow's gRPC", Instant::now()) {
        let line = format!(
            "starwire: refused a local connection that would speak gRPC in this task's name: {why} (repeats are suppressed for a minute)"
        );
        shared.host.log(Level::Warning, &line);
    }
}

/// Connects a client with TensorFlow's server until both have ended their sides, or one of them is gone.
async fn carry<H: Host>(shared: Arc<Shared<H>>, client: TcpStream, to: Destination<H>, number: u64) -> io::Result<()> {
    let channel = match to {
        Destination::Task(channel) => channel,
        Destination::Own => {
            let behind = shared.control.get().and_then(|control| control.behind());
            let behind = behind.ok_or(io::ErrorKind::NotConnected)?;
            drop(shared);
            return grpc_proxy::proxy(client, &behind.socket).await;
        }
    };
    drop(shared);
    let tunnel = Tunnel { channel, number };
    if let Err(Failure { code, message }) = tunnel.ask(Request::Open).await {
        // A client that is only cut off tries again, and says nothing but that the peer is unavailable.
        return match code {
            code::UNAVAILABLE | code::DEADLINE_EXCEEDED | code::CANCELLED => Ok(()),
            _ => grpc_proxy::deny(client, &message).await,
        };
    }
    client.set_nodelay(true)?;
    let (mut from, mut to) = client.into_split();
    let up = async {
        let mut buffer = vec![0; MOST_CARRIED];
        loop {
            let n = from.read(&mut buffer).await?;
            let bytes = &buffer[..n];
            tunnel.ask(if n == 0 { Request::End } else { Request::Send(bytes) }).await.map_err(lost)?;
            if n == 0 {
                return Ok(());
            }
        }
    };
    let down = async {
        loop {
            let bytes = tunnel.ask(Request::Receive).await.map_err(lost)?;
            if bytes.is_empty() {
                return to.shutdown().await;
            }
            to.write_all(&bytes).await?;
        }
    };
    tokio::try_join!(up, down).map(drop)
}

fn lost(failure: Failure) -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionAborted, failure.message)
}

/// A stream to TensorFlow's server of a task.
struct Tunnel<H: Host> {
    channel: Channel<H>,
    number: u64,
}

impl<H: Host> Tunnel<H> {
    async fn ask(&self, request: Request<'_>) -> Result<Vec<u8>, Failure> {
        let (answer, answered) = oneshot::channel();
        self.call(request, answer);
        // A question is always answered.
        answered.await.unwrap_or_else(|_| Err(Failure { code: code::CANCELLED, message: String::new() }))
    }

    fn call(&self, request: Request<'_>, answer: oneshot::Sender<Result<Vec<u8>, Failure>>) {
        self.channel.call(NewCall {
            method: u32::from(TUNNEL),
            meta: write(self.number, request),
            payload: None,
            deadline_ms: 0,
            wait_for_ready: false,
            deadline_to_connect: false,
            op: PendingOp::of_engine(|outcome| answer_with(answer, outcome)),
        });
    }
}

impl<H: Host> Drop for Tunnel<H> {
    fn drop(&mut self) {
        // Nobody waits for the answer.
        self.call(Request::Close, oneshot::channel().0);
    }
}

fn answer_with(answer: oneshot::Sender<Result<Vec<u8>, Failure>>, outcome: &Outcome<'_>) {
    let result = match outcome {
        Outcome::Ok { meta } => Ok(meta.to_vec()),
        Outcome::PeerError { code, message, .. }
        | Outcome::Local { code, message }
        | Outcome::Lost { code, message } => Err(Failure { code: *code, message: (*message).to_owned() }),
    };
    // The caller may be gone.
    let _ = answer.send(result);
}
