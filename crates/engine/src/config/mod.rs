//! Environment variables and `.endpoint_map`, parsed once into types. A [`Config`] needs no further checks.

mod address;
mod banner;
mod endpoint_map;
mod env;
mod error;
mod fusion;
mod joinable;
mod kinds;
mod names;
mod operations;
mod ports;
mod protocol;
mod reader;
mod resolve;
mod row;
mod secret;
mod star;
mod state;
mod tls;
mod unknown;
mod variables;
mod verbs;

#[cfg(test)]
pub(crate) mod testing;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

pub use crate::tls::Tls;
pub use address::{AddressError, HostPort, is_loopback, is_unspecified};
pub use banner::Running;
pub use endpoint_map::{EndpointMap, EndpointMapError, FILE_NAME as ENDPOINT_MAP_FILE_NAME, MapLine};
pub use env::{Env, MapEnv, ProcessEnv};
pub use error::ConfigError;
pub use fusion::Fusion;
pub use joinable::Joinable;
pub use names::OwnNames;
pub use ports::DataAddress;
pub use protocol::{Protocol, UnknownProtocol};
pub use reader::Setting;
pub use row::{Origin, ReadBy, Variable};
pub use star::{PlanLimits, StarConfig, StepLimits};
pub use starwire_net::transport::verbs::{TransportChoice, VerbsConfig};
use starwire_planner::ops::Added;
pub use starwire_protocol::Secret;
pub use state::{StateConfig, StateFrom, StateMode, TakeOver};
pub use unknown::{FOREIGN_PREFIXES, unread_variables};
pub use variables::VARIABLES;
pub use verbs::verbs_config;

/// The server to configure. Comes from the ClusterSpec and the machine, not from the environment.
#[derive(Clone, Debug)]
pub struct Identity {
    pub protocol: Protocol,
    /// "ps"
    pub job: String,
    /// "/job:ps/replica:0/task:0"
    pub task: String,
    /// Own entry of the ClusterSpec; the port may be 0.
    pub grpc_address: String,
    /// Name and ClusterSpec address of every task.
    pub tasks: Vec<(String, String)>,
    /// CPUs that the process may use: affinity and cgroup.
    pub cpus_allowed: usize,
    /// TensorFlow's gRPC server can be put behind the task's only port.
    pub grpc_gives_way: bool,
}

impl Identity {
    /// The address of a task in the ClusterSpec.
    pub fn address_of(&self, task: &str) -> Option<&str> {
        self.tasks.iter().find(|(name, _)| name == task).map(|(_, address)| address.as_str())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DriverChoice {
    /// The default: epoll, for now.
    Auto,
    Epoll,
    IoUring,
}

/// Clients that may use the control service on the data port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlAccess {
    Everybody,
    Loopback,
    Nobody,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortsChoice {
    /// One where that is possible and the endpoint map has no other.
    Auto,
    One,
    Two,
}

/// The TCP ports of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ports {
    /// The one of the ClusterSpec, for everything: TensorFlow's gRPC is behind it.
    One,
    /// TensorFlow's gRPC has the one of the ClusterSpec; the data port is another.
    Two,
}

/// Whether clients of TensorFlow's gRPC are passed on to it, if a server has one port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrpcAccess {
    /// Unless the cluster has a secret. With TLS: tasks of the cluster only.
    Auto,
    Everybody,
    Nobody,
}

/// Whether tasks on one host use unix sockets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnixSockets {
    /// And large payloads are copied once, from process to process, where the kernel allows it.
    Auto,
    /// And all payloads go through them.
    Socket,
    Off,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// Silence after which a PING is sent.
    pub interval: Duration,
    /// Silence after the PING until the connection counts as lost.
    pub timeout: Duration,
}

#[derive(Clone, Debug)]
pub struct Config {
    pub identity: Identity,
    /// Number of reactor threads, at least 1.
    pub reactors: usize,
    /// Busy polling.
    pub polling: bool,
    /// Pins each reactor to its own CPU.
    pub pinning: bool,
    /// How long a request waits for a connection.
    pub connect_timeout: Duration,
    /// Has a line for every task in `identity.tasks`.
    pub endpoint_map: Option<EndpointMap>,
    pub ports: Ports,
    /// With two ports and without a map: what is added to a port of the ClusterSpec to get the data port.
    pub port_offset: u16,
    /// With one port: clients of TensorFlow's gRPC are passed on to it …
    pub passes_grpc: bool,
    /// … and those that have proved by TLS that they are tasks of the cluster …
    pub passes_members: bool,
    /// … and those that come inside a connection of a task.
    pub passes_tunnels: bool,
    /// TensorFlow's gRPC from this task to others travels inside its connections to them.
    pub tunnels: bool,
    /// Addresses to listen on: the first that can be bound. Port 0: the system chooses. `[::]` means dual stack.
    pub bind: Vec<SocketAddr>,
    /// The names under which clients of the control service reach this task.
    pub names: OwnNames,
    pub driver: DriverChoice,
    pub keepalive: Keepalive,
    pub secret: Option<Secret>,
    pub tls: Option<Arc<Tls>>,
    /// May be empty. Printable ASCII without spaces.
    pub cluster_id: String,
    /// The tasks that may join. `None`: tasks that are not in the ClusterSpec may connect, but are never connected to.
    pub joinable: Option<Joinable>,
    pub unix: UnixSockets,
    /// RDMA.
    pub verbs: VerbsConfig,
    pub ps_jobs: Vec<String>,
    /// Largest payload of one incoming call.
    pub max_call_bytes: u64,
    pub control: ControlAccess,
    /// Of clients whose certificate was verified.
    pub control_by_tls: ControlAccess,
    pub star: StarConfig,
    /// Of a parameter server.
    pub state: Option<StateConfig>,
    /// The effective value of every variable, for statistics; without secrets.
    pub settings: Vec<Setting>,
    /// Warnings for the operator: misspelt variables, doubtful addresses.
    pub warnings: Vec<String>,
}

/// The table of `docs/configuration.md`.
pub fn variables_markdown() -> String {
    row::markdown(VARIABLES)
}

impl Config {
    /// Reads everything, once. The first problem is the error.
    pub fn from_env(env: &dyn Env, identity: Identity) -> Result<Self, ConfigError> {
        resolve::from_env(env, identity)
    }

    /// The jobs that are parameter servers, if the environment names them; for code that builds a session's graphs.
    pub fn ps_jobs_from_env(env: &dyn Env) -> Result<Option<Vec<String>>, ConfigError> {
        reader::Reader::new(env, Protocol::Grpc).get_if_set(&variables::PS_JOBS)
    }

    /// Bytes that justify a star call, if the environment says so; for code that builds a session's graphs.
    pub fn star_split_bytes_from_env(env: &dyn Env) -> Result<Option<u64>, ConfigError> {
        reader::Reader::new(env, Protocol::Grpc).get(&variables::STAR_SPLIT_BYTES)
    }

    /// How long a star call waits for a parameter server; for code that builds a session's graphs.
    pub fn recover_s_from_env(env: &dyn Env) -> Result<u64, ConfigError> {
        reader::Reader::new(env, Protocol::Grpc).get(&variables::RECOVER_S)
    }

    /// The TLS of a tool that is no server, such as starctl.
    pub fn tls_from_env(env: &dyn Env) -> Result<Option<Tls>, ConfigError> {
        tls::read(&mut reader::Reader::new(env, Protocol::Grpc))
    }

    /// The operations that a file adds to the op table, if any.
    pub fn operations_from_env(env: &dyn Env) -> Result<Option<Added>, ConfigError> {
        operations::read(&mut reader::Reader::new(env, Protocol::Grpc))
    }

    /// Whether sparse updates have starwire's kernels; for code that makes kernels.
    pub fn row_updates_from_env(env: &dyn Env) -> Result<bool, ConfigError> {
        reader::Reader::new(env, Protocol::Grpc).get(&variables::ROW_UPDATES)
    }
}
