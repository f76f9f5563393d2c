//! TLS: the files of `STARWIRE_TLS_*`, read when the configuration is.

use std::sync::Arc;

use super::error::ConfigError;
use super::reader::Reader;
use super::{Identity, Ports, TransportChoice, variables};
use crate::config::address::{HostPort, is_unspecified};
use crate::tls::{File, Files, Subject, Tls, Unusable};

/// None: the cluster has no TLS.
pub(super) fn read(reader: &mut Reader<'_>) -> Result<Option<Tls>, ConfigError> {
    let certificate = (variables::TLS_CERT.name, reader.get(&variables::TLS_CERT)?);
    let key = (variables::TLS_KEY.name, reader.get(&variables::TLS_KEY)?);
    let authorities = (variables::TLS_CA.name, reader.get(&variables::TLS_CA)?);
    let names = reader.get(&variables::TLS_PEERS)?;
    let all = [&certificate, &key, &authorities];
    let missing: Vec<&str> = all.iter().filter(|(_, value)| value.is_none()).map(|(name, _)| *name).collect();
    let ((_, Some(certificate)), (_, Some(key)), (_, Some(authorities))) = (certificate, key, authorities) else {
        return if missing.len() == 3 { Ok(None) } else { Err(ConfigError::HalfTls(missing.join(" and "))) };
    };
    let files = Files { certificate: certificate.into(), key: key.into(), authorities: authorities.into() };
    Tls::load(files, names).map(Some).map_err(unusable)
}

/// What a server needs besides the files.
pub(super) fn for_server(
    tls: Option<Tls>,
    allows_rdma: bool,
    ports: Ports,
    transport: TransportChoice,
    identity: &Identity,
) -> Result<Option<Arc<Tls>>, ConfigError> {
    let Some(tls) = tls else { return Ok(None) };
    let conflict = |second, reason: &str| {
        Err(ConfigError::Conflict { first: variables::TLS_CERT.name, second, reason: reason.to_owned() })
    };
    if ports == Ports::Two {
        let reason = "TensorFlow's gRPC would have its own port, without TLS: set STARWIRE_PORTS=one in all tasks";
        return conflict(variables::PORTS.name, reason);
    }
    if transport == TransportChoice::Verbs && !allows_rdma {
        let reason = "RDMA is not encrypted: use another protocol, or set STARWIRE_TLS_ALLOW_RDMA=true if only TLS's identities are wanted";
        return conflict(variables::TRANSPORT.name, reason);
    }
    let address = Some(identity.grpc_address.as_str());
    let is_known = identity.grpc_address.parse().is_ok_and(|own: HostPort| !is_unspecified(&own.host));
    if is_known {
        tls.speaks_for_itself(&Subject { task: &identity.task, address }).map_err(unusable)?;
    }
    Ok(Some(Arc::new(tls)))
}

fn unusable(Unusable { file, path, reason }: Unusable) -> ConfigError {
    let name = match file {
        File::Certificate => variables::TLS_CERT.name,
        File::Key => variables::TLS_KEY.name,
        File::Authorities => variables::TLS_CA.name,
    };
    ConfigError::TlsFile { name, path, reason }
}
