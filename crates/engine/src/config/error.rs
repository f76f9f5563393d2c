//! What can be wrong with a configuration. Each message says where the value came from and what would be right.

use std::io;
use std::path::PathBuf;

use super::endpoint_map::EndpointMapError;

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{name}={value:?} is not understood: it must be {allowed}")]
    Value { name: &'static str, value: String, allowed: String },
    /// Like `Value`, without showing the value.
    #[error("{name} is not usable: {reason}")]
    Secret { name: &'static str, reason: String },
    #[error("{first} and {second} contradict each other: {reason}")]
    Conflict { first: &'static str, second: &'static str, reason: String },
    #[error("{name} names {}, which cannot be read: {source}", path.display())]
    File { name: &'static str, path: PathBuf, source: io::Error },
    #[error("the ClusterSpec address {address:?} of {task} is not usable: {reason}")]
    ClusterAddress { task: String, address: String, reason: String },
    #[error("the current directory, where .endpoint_map is looked for, cannot be found out: {0}")]
    CurrentDir(io::Error),
    #[error(transparent)]
    EndpointMap(#[from] EndpointMapError),
}
