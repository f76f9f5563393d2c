//! The server side of tunnels, at TensorFlow's server.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{mpsc, oneshot};

use crate::api::{Host, Ticket};
use crate::command::{Command, Meta};
use crate::control::{Behind, ControlError, grpc_proxy};
use crate::keys::shard_of;
use crate::shared::Shared;
use starwire_protocol::code;
use starwire_protocol::tunnel::{MOST_CARRIED, Request, read};

/// The most streams of one connection.
const MOST_STREAMS: usize = 64;

/// A connection and the number that the peer gave the stream.
type Key = (u64, u64);

/// The streams of all connections.
pub struct TunnelServer<H: Host> {
    shared: Arc<Shared<H>>,
    streams: Mutex<HashMap<Key, Stream<H>>>,
}

/// A stream as reactors see it. It ends when this is dropped.
struct Stream<H: Host> {
    sends: mpsc::Sender<(Asked<H>, Vec<u8>)>,
    receives: mpsc::Sender<Asked<H>>,
    _open: oneshot::Sender<()>,
}

impl<H: Host> TunnelServer<H> {
    pub fn new(shared: Arc<Shared<H>>) -> Self {
        Self { shared, streams: Mutex::new(HashMap::new()) }
    }

    pub fn peer_gone(&self, conn: u64) {
        self.lock().retain(|(of, _), _| *of != conn);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Key, Stream<H>>> {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A peer's call for a stream.
    pub fn call(self: &Arc<Self>, ticket: Ticket, meta: &[u8]) {
        let asked = Asked { shared: Arc::downgrade(&self.shared), ticket, is_answered: false };
        let Some((number, request)) = read(meta) else {
            return asked.refuse(code::INVALID_ARGUMENT, "malformed metadata of a tunnel's call");
        };
        let key = (ticket.conn, number);
        match request {
            Request::Open => self.open_stream(key, asked),
            Request::Send(bytes) => self.pass(key, |stream| stream.sends.try_send((asked, bytes.to_vec())).is_ok()),
            // It waits for what was sent before.
            Request::End => self.pass(key, |stream| stream.sends.try_send((asked, Vec::new())).is_ok()),
            Request::Receive => self.pass(key, |stream| stream.receives.try_send(asked).is_ok()),
            Request::Close => {
                self.lock().remove(&key);
                asked.answer(&[]);
            }
        }
    }

    /// Passes a request on to its stream. One that comes before the last was answered ends the stream, and whatever
    /// cannot be passed on says so when it is dropped.
    fn pass(&self, key: Key, to: impl FnOnce(&Stream<H>) -> bool) {
        let mut streams = self.lock();
        if streams.get(&key).is_some_and(|stream| !to(stream)) {
            streams.remove(&key);
        }
    }

    fn open_stream(self: &Arc<Self>, key: Key, asked: Asked<H>) {
        let Some(control) = self.shared.control.get() else { return };
        let Some(behind) = control.behind().filter(|behind| behind.is_open_to_tunnels) else {
            let why = ControlError::NoGrpc.to_string();
            return asked.refuse(code::PERMISSION_DENIED, &why);
        };
        let (sends, sent) = mpsc::channel(1);
        let (receives, wanted) = mpsc::channel(1);
        let (open, closed) = oneshot::channel();
        {
            let mut streams = self.lock();
            if streams.keys().filter(|(conn, _)| *conn == key.0).count() >= MOST_STREAMS {
                return asked.refuse(code::RESOURCE_EXHAUSTED, "the connection has too many tunnels");
            }
            if streams.contains_key(&key) {
                return asked.refuse(code::INVALID_ARGUMENT, "the number of a tunnel was used twice");
            }
            streams.insert(key, Stream { sends, receives, _open: open });
        }
        let server = Arc::downgrade(self);
        let served = async move {
            tokio::select! {
                // An error was told to the peer by the call that it concerned.
                _ = serve(behind, asked, sent, wanted) => {}
                _ = closed => {}
            }
            if let Some(server) = server.upgrade() {
                server.lock().remove(&key);
            }
        };
        match control.run(served) {
            Ok(()) => self.shared.metrics.count(|cells| cells.grpc_connections.add(1)),
            Err(_) => drop(self.lock().remove(&key)),
        }
    }
}

async fn serve<H: Host>(
    behind: Arc<Behind>,
    opened: Asked<H>,
    mut sent: mpsc::Receiver<(Asked<H>, Vec<u8>)>,
    mut wanted: mpsc::Receiver<Asked<H>>,
) -> io::Result<()> {
    let connected = grpc_proxy::connect(&behind.socket).await;
    let (mut from, mut to) = match connected {
        Ok(socket) => socket.into_split(),
        Err(error) => {
            opened.fail(&error);
            return Err(error);
        }
    };
    opened.answer(&[]);
    let up = async {
        while let Some((asked, bytes)) = sent.recv().await {
            let result = if bytes.is_empty() { to.shutdown().await } else { to.write_all(&bytes).await };
            match result {
                Ok(()) => asked.answer(&[]),
                Err(error) => {
                    asked.fail(&error);
                    return Err(error);
                }
            }
        }
        Ok(())
    };
    let down = async {
        let mut buffer = vec![0; MOST_CARRIED];
        while let Some(asked) = wanted.recv().await {
            match from.read(&mut buffer).await {
                Ok(n) => asked.answer(&buffer[..n]),
                Err(error) => {
                    asked.fail(&error);
                    return Err(error);
                }
            }
        }
        Ok(())
    };
    tokio::try_join!(up, down).map(drop)
}

/// A call that is answered once.
struct Asked<H: Host> {
    shared: Weak<Shared<H>>,
    ticket: Ticket,
    is_answered: bool,
}

impl<H: Host> Asked<H> {
    fn answer(mut self, bytes: &[u8]) {
        self.reply(0, bytes);
    }

    fn refuse(mut self, code: i32, why: &str) {
        self.reply(code, format!("starwire: {why}").as_bytes());
    }

    fn fail(self, error: &io::Error) {
        self.refuse(code::UNAVAILABLE, &format!("the connection to TensorFlow's gRPC server failed: {error}"));
    }

    fn reply(&mut self, code: i32, meta: &[u8]) {
        self.is_answered = true;
        let Some(shared) = self.shared.upgrade() else { return };
        let Ticket { conn, id } = self.ticket;
        shared.send(shard_of(conn), Command::Reply { conn, id, code, meta: Meta::of(meta), payload: None });
    }
}

impl<H: Host> Drop for Asked<H> {
    fn drop(&mut self) {
        if !self.is_answered {
            self.reply(code::UNAVAILABLE, b"starwire: there is no such tunnel, or it has ended");
        }
    }
}
