//! Talking to servers' control service.

use std::future::Future;
use std::time::Duration;

use starwire_engine::config::HostPort;
use tonic::Code;
use tonic::transport::{Channel, Endpoint};

use crate::failure::Failure;
use crate::tls::{self, Connector};

/// A channel that connects when it is first used, and again after a failure.
pub fn channel(address: &HostPort, timeout: Duration) -> Result<Channel, Failure> {
    let endpoint = Endpoint::from_shared(format!("http://{address}"))?.connect_timeout(timeout).timeout(timeout);
    Ok(match tls::from_env()? {
        Some(tls) => endpoint.connect_with_connector_lazy(Connector { tls, address: address.clone() }),
        None => endpoint.connect_lazy(),
    })
}

/// Why a call to a server did not work, for people.
pub fn explain(status: &tonic::Status) -> String {
    let mut cause: &dyn std::error::Error = status;
    while let Some(deeper) = cause.source() {
        cause = deeper;
        if let Some(error) = cause.downcast_ref::<std::io::Error>() {
            // Connection refused, host unreachable ...: says all there is to say.
            return error.to_string();
        }
    }
    match status.code() {
        Code::DeadlineExceeded | Code::Cancelled => "no answer in time".to_owned(),
        Code::Unimplemented => "no control service here: not a starwire data port".to_owned(),
        Code::Unavailable | Code::Unknown | Code::Internal => {
            format!("not a starwire data port, or its control service is off ({cause})")
        }
        _ => status.message().to_owned(),
    }
}

/// Ends a call in time that is still looking up a name, connecting, or reading an answer.
pub async fn within<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, tonic::Status> {
    let late = || Err(tonic::Status::deadline_exceeded("no answer in time"));
    tokio::time::timeout(timeout, call).await.unwrap_or_else(|_| late())
}

/// Runs `future`, and waits for nothing else: a name that is still looked up has a thread of its own.
pub fn block_on<T>(future: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::Failed(format!("cannot start an event loop: {e}")))?;
    let result = runtime.block_on(future);
    runtime.shutdown_background();
    result
}
