//! TLS to servers, with the certificate of `STARWIRE_TLS_*`.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use starwire_engine::config::{Config, HostPort, ProcessEnv};
use starwire_engine::tls::{Tls, explain};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls;
use tonic::codegen::Service;

use crate::failure::Failure;

/// The TLS of the environment, if it has one.
pub fn from_env() -> Result<Option<Arc<Tls>>, Failure> {
    Ok(Config::tls_from_env(&ProcessEnv)?.map(Arc::new))
}

/// Connects to one server, whose certificate a CA of the cluster must have issued.
#[derive(Clone)]
pub struct Connector {
    pub tls: Arc<Tls>,
    pub address: HostPort,
}

impl<Request> Service<Request> for Connector {
    type Response = TokioIo<TlsStream<TcpStream>>;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Self::Response>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request) -> Self::Future {
        let Self { tls, address } = self.clone();
        Box::pin(async move {
            let socket = TcpStream::connect((address.host.as_str(), address.port)).await?;
            let config = tls.current(|_, _| {}).http_client.clone();
            let peer = socket.peer_addr()?.ip().to_canonical();
            let connected = TlsConnector::from(config).connect(peer.into(), socket).await;
            connected.map(TokioIo::new).map_err(|error| match error.get_ref().and_then(|e| e.downcast_ref()) {
                Some(inner) => io::Error::other(explain(inner as &rustls::Error)),
                None => error,
            })
        })
    }
}
