//! A worker's two ends over stock gRPC: a client of TensorFlow's WorkerService, and a WorkerService that answers
//! RecvTensor.

use std::collections::HashMap;
use std::convert::Infallible;
use std::future::Future;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use tokio::net::TcpListener;
use tokio::sync::oneshot;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::http;
use tonic::server::{NamedService, UnaryService};
use tonic::transport::server::{TcpConnectInfo, TcpIncoming};
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Request, Response, Status};

use bytes::{Buf, BufMut, Bytes};

use crate::link::{Ask, Event, Events, Link, StarRequest, edge_of};
use crate::tensor::Tensor;
use crate::wire::{self, Malformed, Value};
use crate::worker::nothing;

const SERVICE: &str = "tensorflow.WorkerService";
/// gRPC's own default is 64 KiB; TensorFlow's grows with what it measures.
const WINDOW: u32 = 4 << 20;
// tensorflow/core/protobuf/worker.proto: RecvTensorRequest.
const STEP_ID: u32 = 1;
const RENDEZVOUS_KEY: u32 = 2;

pub struct Grpc {
    channel: Channel,
    events: Events,
    asked: Arc<Asked>,
}

/// Who answers at which address.
pub type Doors = Arc<Mutex<HashMap<SocketAddr, Arc<Asked>>>>;

/// What the parameter server wants from one worker.
pub struct Asked {
    events: Events,
    next: AtomicU64,
    askers: Mutex<HashMap<u64, oneshot::Sender<Bytes>>>,
}

impl Grpc {
    /// Connects a worker that answers at `own`.
    pub async fn connect(server: SocketAddr, own: SocketAddr, doors: &Doors, events: Events) -> Result<Self, String> {
        let endpoint = Endpoint::from_shared(format!("http://{server}")).map_err(|error| error.to_string())?;
        let endpoint =
            endpoint.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW).tcp_nodelay(true);
        let channel = endpoint.connect().await.map_err(|error| format!("{server}: {}", whole(&error)))?;
        let asked =
            Arc::new(Asked { events: events.clone(), next: AtomicU64::new(0), askers: Mutex::new(HashMap::new()) });
        lock(doors).insert(own, asked.clone());
        Ok(Self { channel, events, asked })
    }

    fn start(&self, token: u64, method: &str, request: Vec<u8>, least: Option<u64>) {
        let path = http::uri::PathAndQuery::try_from(format!("/{SERVICE}/{method}"));
        let mut client = tonic::client::Grpc::new(self.channel.clone()).max_decoding_message_size(usize::MAX);
        let events = self.events.clone();
        tokio::task::spawn_local(async move {
            let result = async {
                let path = path.map_err(|error| error.to_string())?;
                client.ready().await.map_err(|error| whole(&error))?;
                let reply = client.unary(Request::new(Bytes::from(request)), path, Raw).await;
                let reply = reply.map_err(|status| format!("{:?}: {}", status.code(), status.message()))?.into_inner();
                match least {
                    // The reply is the tensor's bytes and a few more.
                    Some(least) if (reply.len() as u64) < least => {
                        Err(format!("the answer has {} bytes, the recorded tensor has {least}", reply.len()))
                    }
                    Some(_) => Ok(nothing()),
                    None => Ok(reply),
                }
            };
            let result = result.await;
            let _ = events.send(Event::Ended { token, result });
        });
    }
}

impl Link for Grpc {
    fn call(&self, token: u64, name: &str, _: u16, request: Vec<u8>) {
        self.start(token, name, request, None);
    }

    fn pull(&self, token: u64, pull: Ask<'_>) {
        match (pull.request)() {
            Ok(request) => self.start(token, "RecvTensor", request, Some(pull.bytes)),
            Err(Malformed) => {
                let result = Err("the recorded request is malformed".to_owned());
                let _ = self.events.send(Event::Ended { token, result });
            }
        }
    }

    fn star(&self, token: u64, _: StarRequest) {
        let _ = self.events.send(Event::Ended { token, result: Err("grpc has no star calls".to_owned()) });
    }

    fn answer(&self, asker: u64, tensor: &Arc<Tensor>) {
        if let Some(asker) = lock(&self.asked.askers).remove(&asker) {
            // Whoever gave up meanwhile needs no answer.
            let _ = asker.send(tensor.response.clone());
        }
    }
}

/// Serves all workers at one listener.
pub async fn serve(listener: TcpListener, doors: Doors) -> Result<(), String> {
    let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
    let builder = Server::builder().initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    let mut server = builder.tcp_nodelay(true);
    server.add_service(Workers { doors }).serve_with_incoming(incoming).await.map_err(|error| whole(&error))
}

#[derive(Clone)]
struct Workers {
    doors: Doors,
}

impl NamedService for Workers {
    const NAME: &'static str = SERVICE;
}

type Answering<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl tonic::codegen::Service<http::Request<Body>> for Workers {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = Answering<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let own = request.extensions().get::<TcpConnectInfo>().and_then(TcpConnectInfo::local_addr);
        let method = request.uri().path().rsplit('/').next().unwrap_or_default();
        let asked = own.filter(|_| method == "RecvTensor").and_then(|own| lock(&self.doors).get(&own).cloned());
        Box::pin(async move {
            let mut grpc = tonic::server::Grpc::new(Raw).max_decoding_message_size(usize::MAX);
            Ok(grpc.unary(RecvTensor { asked }, request).await)
        })
    }
}

struct RecvTensor {
    asked: Option<Arc<Asked>>,
}

impl UnaryService<Bytes> for RecvTensor {
    type Response = Bytes;
    type Future = Answering<Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        let asked = self.asked.clone();
        Box::pin(async move {
            let asked = asked.ok_or_else(|| Status::unimplemented("a simulated worker only answers RecvTensor"))?;
            let (step, edge) = parse(request.get_ref()).ok_or_else(|| Status::invalid_argument("RecvTensorRequest"))?;
            let asker = asked.next.fetch_add(1, Ordering::Relaxed);
            let (answer, answered) = oneshot::channel();
            lock(&asked.askers).insert(asker, answer);
            let _ = asked.events.send(Event::Asked { step, edge, asker });
            let tensor = answered.await.map_err(|_| Status::unavailable("the simulated worker has ended"))?;
            Ok(Response::new(tensor))
        })
    }
}

fn parse(request: &[u8]) -> Option<(u64, String)> {
    let Ok(Some(Value::Varint(step))) = wire::find(request, STEP_ID) else { return None };
    let Ok(Some(Value::Bytes(key))) = wire::find(request, RENDEZVOUS_KEY) else { return None };
    Some((step, edge_of(std::str::from_utf8(key).ok()?)?.to_owned()))
}

/// Messages as the bytes that they are.
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }
    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An error with its causes.
fn whole(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(deeper) = cause {
        text += &format!(": {deeper}");
        cause = deeper.source();
    }
    text
}
