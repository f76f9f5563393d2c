//! From variables to a [`Config`]: which variable applies to which job, and what follows from it.

use std::time::Duration;

use super::address::HostPort;
use super::endpoint_map::EndpointMap;
use super::env::Env;
use super::error::ConfigError;
use super::fusion::Fusion;
use super::joinable::Joinable;
use super::names::OwnNames;
use super::ports::{self, Listener};
use super::reader::Reader;
use super::star::StarConfig;
use super::unknown::unread_variables;
use super::{
    Config, ControlAccess, GrpcAccess, Identity, Keepalive, Ports, StateConfig, operations, secret, tls, variables,
    verbs,
};
use starwire_planner::roles;

/// The purpose of a job, as far as the environment distinguishes jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum JobKind {
    /// Jobs `worker` and `chief`: the variables that begin with `WORKER_`.
    Worker,
    Ps,
    /// Any other job: the variables that begin with `PS_`, but its own number of reactors.
    Other,
}

/// Of jobs that are neither workers nor parameter servers.
const OTHER_REACTORS: usize = 16;

/// The state that this task keeps.
fn state(reader: &mut Reader<'_>, identity: &Identity, is_server: bool) -> Result<Option<StateConfig>, ConfigError> {
    let state = StateConfig::read(reader)?;
    if is_server && identity.protocol.is_star() {
        return Ok(state);
    }
    if state.is_some_and(|state| state.from.is_some()) {
        // It would begin without the state, beside the server that has it.
        let task = &identity.task;
        let reason = format!(
            "{task} keeps no state, because it is no parameter server (STARWIRE_PS_JOBS) of star_server or star_server_lite"
        );
        return Err(ConfigError::Contradiction { name: variables::STATE_FROM.name, reason });
    }
    Ok(None)
}

pub(super) fn from_env(env: &dyn Env, identity: Identity) -> Result<Config, ConfigError> {
    let reader = &mut Reader::new(env, identity.protocol);
    let mut warnings = unread_variables(env);

    let ps_jobs = reader.get(&variables::PS_JOBS)?;
    let kind = kind(&identity.job, &ps_jobs);
    let worker_polling = reader.get(&variables::WORKER_POLLING)?;
    let ps_polling = reader.get(&variables::PS_POLLING)?;
    let worker_unpinned = reader.get(&variables::WORKER_UNPINNED)?;
    let ps_unpinned = reader.get(&variables::PS_UNPINNED)?;
    let is_worker = kind == JobKind::Worker;
    let pinning = !if is_worker { worker_unpinned } else { ps_unpinned };
    let joinable = reader.get(&variables::JOIN)?;
    let tasks = identity.tasks.len() + joinable.as_ref().map_or(0, Joinable::count);
    let reactors = reactors(reader, &identity, tasks, kind, pinning)?;
    let connect_timeout = Duration::from_millis(reader.get(&variables::CONNECT_TIMEOUT_MS)?);

    let endpoint_map = EndpointMap::find_with(reader, env)?;
    if let Some(map) = &endpoint_map {
        map.require(identity.tasks.iter().map(|(task, address)| (task.as_str(), address.as_str())))?;
        map.require([(identity.task.as_str(), identity.grpc_address.as_str())])?;
    }
    let map = endpoint_map.as_ref();
    let ports = ports::choose(reader.get(&variables::PORTS)?, &identity, map);
    let port_offset = reader.get(&variables::PORT_OFFSET)?;
    let chosen = reader.get(&variables::BIND)?;
    let (bind, host) = Listener { identity: &identity, map, ports, offset: port_offset, chosen }.addresses()?;
    let names = own_names(env, &identity, &host);

    let driver = reader.get(&variables::DRIVER)?;
    let [interval, timeout] = reader.get(&variables::KEEPALIVE)?.map(Duration::from_millis);
    let keepalive = Keepalive { interval, timeout };
    let secret = secret::read(reader, &mut warnings)?;
    let tls = tls::read(reader)?;
    let has_proof = secret.is_some() || tls.is_some();
    let grpc = grpc_access(reader, ports, &mut warnings)?;
    // Whoever may use it may read the secret.
    let passes_grpc = grpc == GrpcAccess::Everybody || (grpc == GrpcAccess::Auto && !has_proof);
    let passes_members = grpc == GrpcAccess::Everybody || (grpc == GrpcAccess::Auto && secret.is_none());
    let passes_tunnels = grpc != GrpcAccess::Nobody;
    let tunnels = has_proof && ports == Ports::One;
    let cluster_id = reader.get(&variables::CLUSTER_ID)?.unwrap_or_default();
    let unix = reader.get(&variables::UNIX)?;
    let verbs = verbs::read(reader)?;
    let allows_rdma = reader.get(&variables::TLS_ALLOW_RDMA)?;
    let tls = tls::for_server(tls, allows_rdma, ports, verbs.transport, &identity)?;
    let max_call_bytes = reader.get(&variables::MAX_CALL_BYTES)?;
    let control = reader.get(&variables::CONTROL)?;
    if reader.get(&variables::REQUIRE_AUTH)? {
        require_auth(has_proof, ports, passes_grpc, control)?;
    }
    let control_by_tls = control.unwrap_or(ControlAccess::Everybody);
    let control = control.unwrap_or(if has_proof { ControlAccess::Loopback } else { ControlAccess::Everybody });
    // Sessions and kernels read these again; here they are checked, and reported with the rest.
    Fusion::read(reader)?;
    let star = StarConfig::read(reader)?;
    reader.get(&variables::ROW_UPDATES)?;
    reader.get(&variables::RECOVER_S)?;
    let is_server = kind == JobKind::Ps || roles::is_usual(&identity.job);
    let state = state(reader, &identity, is_server)?;
    operations::read(reader)?;

    Ok(Config {
        reactors,
        polling: if is_worker { worker_polling } else { ps_polling },
        pinning,
        connect_timeout,
        endpoint_map,
        ports,
        port_offset,
        passes_grpc,
        passes_members,
        passes_tunnels,
        tunnels,
        bind,
        names,
        driver,
        keepalive,
        secret,
        tls,
        cluster_id,
        joinable,
        unix,
        verbs,
        ps_jobs,
        max_call_bytes,
        control,
        control_by_tls,
        star,
        state,
        settings: std::mem::take(&mut reader.settings),
        warnings,
        identity,
    })
}

fn kind(job: &str, ps_jobs: &[String]) -> JobKind {
    if ps_jobs.iter().any(|ps| ps == job) {
        JobKind::Ps
    } else if job == "worker" || job == "chief" {
        JobKind::Worker
    } else {
        JobKind::Other
    }
}

fn reactors(
    reader: &mut Reader<'_>,
    identity: &Identity,
    tasks: usize,
    kind: JobKind,
    pinning: bool,
) -> Result<usize, ConfigError> {
    let worker = reader.get(&variables::WORKER_CORES)?;
    let ps = reader.get(&variables::PS_CORES)?;
    let limit = match kind {
        JobKind::Worker => worker,
        JobKind::Ps => ps,
        JobKind::Other => OTHER_REACTORS,
    };
    let cpus = identity.cpus_allowed.max(1);
    let Some(exact) = reader.get(&variables::REACTORS)? else {
        return Ok(limit.min(tasks).min(cpus).max(1));
    };
    if pinning && exact > cpus {
        let second =
            if kind == JobKind::Worker { variables::WORKER_UNPINNED.name } else { variables::PS_UNPINNED.name };
        let reason = format!("{exact} reactors cannot have a CPU each: this process may use {cpus}");
        return Err(ConfigError::Conflict { first: variables::REACTORS.name, second, reason });
    }
    Ok(exact)
}

/// Whether clients of TensorFlow's gRPC are passed on.
fn grpc_access(reader: &mut Reader<'_>, ports: Ports, warnings: &mut Vec<String>) -> Result<GrpcAccess, ConfigError> {
    let access = reader.get(&variables::GRPC)?;
    let has_effect = access == GrpcAccess::Auto || ports == Ports::One;
    if !has_effect {
        let (grpc, ports) = (variables::GRPC.name, variables::PORTS.name);
        warnings.push(format!("{grpc} has no effect without {ports}=one: TensorFlow's gRPC has its own port"));
    }
    Ok(access)
}

/// Nothing may answer another host without proof of the secret, or a certificate.
fn require_auth(
    has_proof: bool,
    ports: Ports,
    passes_grpc: bool,
    control: Option<ControlAccess>,
) -> Result<(), ConfigError> {
    let ports_name = variables::PORTS.name;
    let needed = [
        (!has_proof, format!("{} or {}", variables::SECRET_FILE.name, variables::TLS_CERT.name)),
        (ports == Ports::Two, format!("{ports_name}=one")),
        (has_proof && passes_grpc, format!("{}=auto", variables::GRPC.name)),
        (control == Some(ControlAccess::Everybody), format!("{}=loopback", variables::CONTROL.name)),
    ];
    let needed: Vec<String> = needed.into_iter().filter(|(lacks, _)| *lacks).map(|(_, remedy)| remedy).collect();
    if needed.is_empty() { Ok(()) } else { Err(ConfigError::Open(needed.join(", "))) }
}

/// In the ClusterSpec, for peers, and for the machine.
fn own_names(env: &dyn Env, identity: &Identity, host: &str) -> OwnNames {
    let own = identity.grpc_address.parse::<HostPort>().map(|own| own.host);
    let machine = env.host_name();
    OwnNames::new([own.as_deref().ok(), Some(host), machine.as_deref()].into_iter().flatten(), env.search_domains())
}

#[cfg(test)]
mod tests;
