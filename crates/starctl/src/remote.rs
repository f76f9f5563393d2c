//! Talking to servers' control service.

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

pub fn runtime() -> Result<tokio::runtime::Runtime, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.map_err(|e| Failure::Failed(format!("cannot start an event loop: {e}")))
}
