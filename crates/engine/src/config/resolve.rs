//! From variables to a [`Config`]: which variable applies to which job, and what follows from it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::address::{HostAndMaybePort, HostPort, default_bind, is_loopback, is_unspecified};
use super::endpoint_map::{EndpointMap, FILE_NAME};
use super::env::Env;
use super::error::ConfigError;
use super::fusion::Fusion;
use super::names::OwnNames;
use super::reader::Reader;
use super::retired::unread_variables;
use super::star::StarConfig;
use super::{
    Config, ControlAccess, GrpcAccess, Identity, Keepalive, Ports, PortsChoice, secret, tls, variables, verbs,
};

/// The purpose of a job, as far as the environment distinguishes jobs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Role {
    /// Jobs `worker` and `chief`: the variables that begin with `WORKER_`.
    Worker,
    Ps,
    /// Any other job: the variables that begin with `PS_`, but its own number of reactors.
    Other,
}

/// Of jobs that are neither workers nor parameter servers.
const OTHER_REACTORS: usize = 16;

pub(super) fn from_env(env: &dyn Env, identity: Identity) -> Result<Config, ConfigError> {
    let reader = &mut Reader::new(env, identity.protocol);
    let mut warnings = unread_variables(env);

    let ps_jobs = reader.get(&variables::PS_JOBS)?;
    let role = role(&identity.job, &ps_jobs);
    let worker_polling = reader.get(&variables::WORKER_POLLING)?;
    let ps_polling = reader.get(&variables::PS_POLLING)?;
    let worker_unpinned = reader.get(&variables::WORKER_UNPINNED)?;
    let ps_unpinned = reader.get(&variables::PS_UNPINNED)?;
    let is_worker = role == Role::Worker;
    let pinning = !if is_worker { worker_unpinned } else { ps_unpinned };
    let reactors = reactors(reader, &identity, role, pinning)?;
    let connect_timeout = Duration::from_millis(reader.get(&variables::CONNECT_TIMEOUT_MS)?);

    let endpoint_map = EndpointMap::find_with(reader, env)?;
    if let Some(map) = &endpoint_map {
        map.require(identity.tasks.iter().map(|(task, address)| (task.as_str(), address.as_str())))?;
        map.require([(identity.task.as_str(), identity.grpc_address.as_str())])?;
    }
    let chosen = Chosen { bind: reader.get(&variables::BIND)?, advertise: reader.get(&variables::ADVERTISE)? };
    let ports = ports(reader, &identity, endpoint_map.as_ref(), &chosen)?;
    let (bind, advertise) = addresses(env, &identity, ports, endpoint_map.as_ref(), chosen, &mut warnings)?;

    let names = own_names(env, &identity, &advertise);

    let driver = reader.get(&variables::DRIVER)?;
    let keepalive = Keepalive {
        interval: Duration::from_millis(reader.get(&variables::KEEPALIVE_MS)?),
        timeout: Duration::from_millis(reader.get(&variables::KEEPALIVE_TIMEOUT_MS)?),
    };
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
    let loans = reader.get(&variables::LOANS)?;
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

    Ok(Config {
        reactors,
        polling: if is_worker { worker_polling } else { ps_polling },
        pinning,
        connect_timeout,
        endpoint_map,
        ports,
        passes_grpc,
        passes_members,
        passes_tunnels,
        tunnels,
        bind,
        advertise,
        names,
        driver,
        keepalive,
        secret,
        tls,
        cluster_id,
        unix,
        loans,
        verbs,
        ps_jobs,
        max_call_bytes,
        control,
        control_by_tls,
        star,
        settings: std::mem::take(&mut reader.settings),
        warnings,
        identity,
    })
}

fn role(job: &str, ps_jobs: &[String]) -> Role {
    if ps_jobs.iter().any(|ps| ps == job) {
        Role::Ps
    } else if job == "worker" || job == "chief" {
        Role::Worker
    } else {
        Role::Other
    }
}

fn reactors(reader: &mut Reader<'_>, identity: &Identity, role: Role, pinning: bool) -> Result<usize, ConfigError> {
    let worker = reader.get(&variables::WORKER_CORES)?;
    let ps = reader.get(&variables::PS_CORES)?;
    let limit = match role {
        Role::Worker => worker,
        Role::Ps => ps,
        Role::Other => OTHER_REACTORS,
    };
    let cpus = identity.cpus_allowed.max(1);
    let Some(exact) = reader.get(&variables::REACTORS)? else {
        return Ok(limit.min(identity.tasks.len()).min(cpus).max(1));
    };
    if pinning && exact > cpus {
        let second = if role == Role::Worker { variables::WORKER_UNPINNED.name } else { variables::PS_UNPINNED.name };
        let reason = format!("{exact} reactors cannot have a CPU each: this process may use {cpus}");
        return Err(ConfigError::Conflict { first: variables::REACTORS.name, second, reason });
    }
    Ok(exact)
}

/// Addresses from variables.
struct Chosen {
    bind: Option<(IpAddr, Option<u16>)>,
    advertise: Option<HostAndMaybePort>,
}

fn ports(
    reader: &mut Reader<'_>,
    identity: &Identity,
    map: Option<&EndpointMap>,
    chosen: &Chosen,
) -> Result<Ports, ConfigError> {
    let choice = reader.get(&variables::PORTS)?;
    let own = identity.grpc_address.parse::<HostPort>().ok().map(|own| own.port);
    let mapped = map.and_then(|map| map.get(&identity.grpc_address)).map(|data| data.port);
    let planned = [mapped, chosen.bind.and_then(|(_, port)| port)];
    // Only peers that ask for the data port learn an address that is advertised.
    let plans_another = chosen.advertise.is_some() || planned.into_iter().flatten().any(|planned| Some(planned) != own);
    Ok(match choice {
        PortsChoice::One => Ports::One,
        PortsChoice::Auto if identity.grpc_gives_way && !plans_another => Ports::One,
        PortsChoice::Auto | PortsChoice::Two => Ports::Two,
    })
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

/// The addresses to listen on and to advertise.
fn addresses(
    env: &dyn Env,
    identity: &Identity,
    ports: Ports,
    map: Option<&EndpointMap>,
    chosen: Chosen,
    warnings: &mut Vec<String>,
) -> Result<(Vec<SocketAddr>, HostAndMaybePort), ConfigError> {
    let own: HostPort =
        identity.grpc_address.parse().map_err(|error: super::AddressError| ConfigError::ClusterAddress {
            task: identity.task.clone(),
            address: identity.grpc_address.clone(),
            reason: error.to_string(),
        })?;
    let mapped = map.and_then(|map| map.get(&identity.grpc_address));
    let reached_as = mapped.map_or(own.host.as_str(), |data| data.host.as_str());
    let port = match ports {
        Ports::One => {
            only_port(identity, own.port, map, chosen.bind.and_then(|(_, port)| port))?;
            own.port
        }
        Ports::Two => mapped.map_or(0, |data| data.port),
    };
    let is_elsewhere = |address: &str| address.parse::<HostPort>().is_ok_and(|other| !is_loopback(&other.host));
    let is_spread = identity.tasks.iter().any(|(task, address)| *task != identity.task && is_elsewhere(address));
    let bind = match chosen.bind {
        Some((ip, chosen)) => vec![SocketAddr::new(ip, chosen.unwrap_or(port))],
        // Peers know a task that calls itself localhost by another name.
        None if ports == Ports::One && is_spread && is_loopback(reached_as) => default_bind("0.0.0.0", port),
        None => default_bind(reached_as, port),
    };
    let is_learnt = ports == Ports::Two && map.is_none();
    let advertise = match chosen.advertise {
        Some(address) => address,
        None => HostAndMaybePort {
            host: own_host(env, identity, reached_as, is_learnt.then_some(&mut *warnings))?,
            port: mapped.map(|data| data.port),
        },
    };
    if is_learnt && is_spread && is_loopback(&advertise.host) {
        warnings.push(format!(
            "peers on other hosts of this cluster will try to reach {} at {}; set STARWIRE_ADVERTISE to a host that they can reach",
            identity.task, advertise.host
        ));
    }
    Ok((bind, advertise))
}

/// In the ClusterSpec, for peers, and for the machine.
fn own_names(env: &dyn Env, identity: &Identity, advertise: &HostAndMaybePort) -> OwnNames {
    let own = identity.grpc_address.parse::<HostPort>().map(|own| own.host);
    let machine = env.host_name();
    let names = [own.as_deref().ok(), Some(advertise.host.as_str()), machine.as_deref()];
    OwnNames::new(names.into_iter().flatten(), env.search_domains())
}

/// With one port, neither the map nor `STARWIRE_BIND` may name another.
fn only_port(identity: &Identity, own: u16, map: Option<&EndpointMap>, chosen: Option<u16>) -> Result<(), ConfigError> {
    let conflict = |second, what: String| {
        let reason =
            format!("{what} for {}, whose only port is {own}, the one of its ClusterSpec entry", identity.task);
        Err(ConfigError::Conflict { first: variables::PORTS.name, second, reason })
    };
    if let Some(line) = map.and_then(|map| map.line(&identity.grpc_address)).filter(|line| line.data.port != own) {
        return conflict(FILE_NAME, format!("{line} gives data port {}", line.data));
    }
    match chosen.filter(|port| *port != own) {
        Some(port) => conflict(variables::BIND.name, format!("port {port} was chosen")),
        None => Ok(()),
    }
}

/// A server whose own entry is 0.0.0.0 or [::] uses the name of its machine.
fn own_host(
    env: &dyn Env,
    identity: &Identity,
    host: &str,
    warnings: Option<&mut Vec<String>>,
) -> Result<String, ConfigError> {
    if !is_unspecified(host) {
        return Ok(host.to_owned());
    }
    let name = env.host_name().ok_or_else(|| ConfigError::ClusterAddress {
        task: identity.task.clone(),
        address: identity.grpc_address.clone(),
        reason: "peers cannot connect to it, and this machine has no host name; set STARWIRE_ADVERTISE".to_owned(),
    })?;
    if let Some(warnings) = warnings {
        warnings.push(format!("this task's ClusterSpec entry is {host}, so it advertises {name}; set STARWIRE_ADVERTISE if peers cannot reach that"));
    }
    Ok(name)
}

#[cfg(test)]
mod tests;
