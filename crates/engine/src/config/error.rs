//! Configuration errors. Each message names the source of the value and the values that are allowed.

use std::io;
use std::path::PathBuf;

use super::endpoint_map::EndpointMapError;
use starwire_planner::ops::TableError;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{name}={value:?} is invalid: it must be {allowed}")]
    Value { name: &'static str, value: String, allowed: String },
    /// Like `Value`, without showing the value.
    #[error("{name} is unusable: {reason}")]
    Secret { name: &'static str, reason: String },
    #[error("{first} and {second} conflict: {reason}")]
    Conflict { first: &'static str, second: &'static str, reason: String },
    #[error("{name} is inconsistent: {reason}")]
    Contradiction { name: &'static str, reason: String },
    #[error("TLS needs STARWIRE_TLS_CERT, STARWIRE_TLS_KEY and STARWIRE_TLS_CA: set {0} as well, or none of them")]
    HalfTls(String),
    #[error("{name} names {}, which cannot be used for TLS: {reason}", path.display())]
    TlsFile { name: &'static str, path: PathBuf, reason: String },
    #[error("STARWIRE_REQUIRE_AUTH forbids this server, which would answer without proof of identity: set {0}")]
    Open(String),
    #[error("{name} names {}, which cannot be read: {source}", path.display())]
    File { name: &'static str, path: PathBuf, source: io::Error },
    #[error("the ClusterSpec address {address:?} of {task} is unusable: {reason}")]
    ClusterAddress { task: String, address: String, reason: String },
    #[error(
        "no data port for the ClusterSpec address {address}: its port and STARWIRE_PORT_OFFSET, {offset}, exceed 65535 together"
    )]
    NoDataPort { address: String, offset: u16 },
    #[error("cannot determine the current directory, to look for .endpoint_map in it: {0}")]
    CurrentDir(io::Error),
    #[error(transparent)]
    EndpointMap(#[from] EndpointMapError),
    #[error("{name}: {source}")]
    Operations { name: &'static str, source: TableError },
}
