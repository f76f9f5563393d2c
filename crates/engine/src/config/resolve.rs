//! From variables to a [`Config`]: which variable applies to which job, and what follows from it.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::address::{HostAndMaybePort, HostPort, default_bind, is_loopback, is_unspecified};
use super::endpoint_map::EndpointMap;
use super::env::Env;
use super::error::ConfigError;
use super::fusion::Fusion;
use super::secret::Secret;
use super::star::StarConfig;
use super::variables::{Reader, unknown_variables};
use super::verbs;
use super::{Config, ControlAccess, DriverChoice, ExecutorChoice, Identity, Keepalive, Role, Shortcut};

const DEFAULT_REACTORS: usize = 16;
const MAX_REACTORS: usize = 256;
const MAX_MILLISECONDS: u64 = 86_400_000;

pub(super) fn from_env(env: &dyn Env, identity: Identity) -> Result<Config, ConfigError> {
    let reader = &mut Reader::new(env);
    let mut warnings = unknown_variables(env);

    let ps_jobs = ps_jobs(reader)?.unwrap_or_else(|| vec!["ps".to_owned()]);
    let role = role(&identity.job, &ps_jobs);
    let worker_polling = reader.boolean("WORKER_ENABLE_POLLING", false)?;
    let ps_polling = reader.boolean("PS_ENABLE_POLLING", false)?;
    let worker_unpinned = reader.boolean("WORKER_DISABLE_PIN_CORES", true)?;
    let ps_unpinned = reader.boolean("PS_DISABLE_PIN_CORES", true)?;
    let is_worker = role == Role::Worker;
    let pinning = !if is_worker { worker_unpinned } else { ps_unpinned };
    let reactors = reactors(reader, &identity, role, pinning)?;
    let connect_timeout = milliseconds(reader, "NETWORK_MAX_CONNECTION_TIMEOUT", 120_000, 1, MAX_MILLISECONDS)?;

    // Read only to appear among the settings.
    reader.text("TF_SEASTAR_ENDPOINT_MAP_PATH")?;
    reader.text("STARWIRE_ENDPOINT_MAP")?;
    let endpoint_map = EndpointMap::find(env)?;
    if let Some(map) = &endpoint_map {
        map.require(identity.tasks.iter().map(|(task, address)| (task.as_str(), address.as_str())))?;
        map.require([(identity.task.as_str(), identity.grpc_address.as_str())])?;
    }
    let (bind, advertise) = addresses(reader, env, &identity, endpoint_map.as_ref(), &mut warnings)?;

    let driver = reader.choice(
        "STARWIRE_DRIVER",
        &[("auto", DriverChoice::Auto), ("epoll", DriverChoice::Epoll), ("io_uring", DriverChoice::IoUring)],
        "auto",
    )?;
    let keepalive = Keepalive {
        interval: milliseconds(reader, "STARWIRE_KEEPALIVE_MS", 5_000, 10, 3_600_000)?,
        timeout: milliseconds(reader, "STARWIRE_KEEPALIVE_TIMEOUT_MS", 15_000, 10, 3_600_000)?,
    };
    let secret = Secret::read(reader, &mut warnings)?;
    let cluster_id = cluster_id(reader)?;
    let shortcut = [("auto", Shortcut::Auto), ("off", Shortcut::Off)];
    let unix = reader.choice("STARWIRE_UNIX", &shortcut, "auto")?;
    let loans = reader.choice("STARWIRE_LOANS", &shortcut, "auto")?;
    let verbs = verbs::read(reader, &identity.protocol)?;
    let max_inflight = reader.number("STARWIRE_MAX_INFLIGHT", 65_536, 16..=1 << 24)?;
    let max_call_bytes = reader.bytes("STARWIRE_MAX_CALL_BYTES", 16 << 30, 1 << 20..=1 << 40)?;
    let metrics = reader.choice("STARWIRE_METRICS", &[("on", true), ("off", false)], "on")?;
    let control = reader.choice(
        "STARWIRE_CONTROL",
        &[("on", ControlAccess::Everybody), ("off", ControlAccess::Nobody), ("loopback", ControlAccess::Loopback)],
        "on",
    )?;
    let fusion = Fusion::read(reader)?;
    let star = StarConfig::read(reader)?;
    let executor = reader.choice(
        "STARWIRE_EXECUTOR",
        &[("auto", ExecutorChoice::Auto), ("on", ExecutorChoice::All), ("off", ExecutorChoice::None)],
        "auto",
    )?;

    Ok(Config {
        role,
        reactors,
        polling: if is_worker { worker_polling } else { ps_polling },
        pinning,
        connect_timeout,
        endpoint_map,
        bind,
        advertise,
        driver,
        keepalive,
        secret,
        cluster_id,
        unix,
        loans,
        verbs,
        ps_jobs,
        max_inflight,
        max_call_bytes,
        metrics,
        control,
        fusion,
        star,
        executor,
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

/// The jobs that are parameter servers, if the environment names them.
pub(super) fn ps_jobs(reader: &mut Reader<'_>) -> Result<Option<Vec<String>>, ConfigError> {
    let name = "STARWIRE_PS_JOBS";
    let Some(text) = reader.text(name)? else { return Ok(None) };
    let jobs: Vec<String> = text.split(',').map(|job| job.trim().to_owned()).collect();
    // TensorFlow's rule for job names.
    let fits = |job: &String| {
        job.starts_with(|c: char| c.is_ascii_alphabetic())
            && job.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
    };
    if jobs.iter().all(fits) {
        return Ok(Some(jobs));
    }
    Err(ConfigError::Value {
        name,
        value: text,
        allowed: "job names (letters, digits, '_') separated by commas".to_owned(),
    })
}

fn reactors(reader: &mut Reader<'_>, identity: &Identity, role: Role, pinning: bool) -> Result<usize, ConfigError> {
    // The star protocols give each reactor more work, so fewer are enough.
    let star = identity.protocol.starts_with("star_server");
    let defaults = if star { (2, 8) } else { (DEFAULT_REACTORS, DEFAULT_REACTORS) };
    let worker = reader.number("NETWORK_WORKER_CORE_NUMBER", defaults.0, 1..=MAX_REACTORS)?;
    let ps = reader.number("NETWORK_PS_CORE_NUMBER", defaults.1, 1..=MAX_REACTORS)?;
    let limit = match role {
        Role::Worker => worker,
        Role::Ps => ps,
        Role::Other => DEFAULT_REACTORS,
    };
    let cpus = identity.cpus_allowed.max(1);
    let exact = reader.optional_number("STARWIRE_REACTORS", 1..=MAX_REACTORS)?;
    let Some(exact) = exact else {
        return Ok(limit.min(identity.tasks.len()).min(cpus).max(1));
    };
    if pinning && exact > cpus {
        let second = if role == Role::Worker { "WORKER_DISABLE_PIN_CORES" } else { "PS_DISABLE_PIN_CORES" };
        let reason = format!("{exact} reactors cannot have a CPU each: this process may use {cpus}");
        return Err(ConfigError::Conflict { first: "STARWIRE_REACTORS", second, reason });
    }
    Ok(exact)
}

/// The addresses to listen on and to advertise.
fn addresses(
    reader: &mut Reader<'_>,
    env: &dyn Env,
    identity: &Identity,
    map: Option<&EndpointMap>,
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
    let mapped_port = mapped.map_or(0, |data| data.port);

    let bind = match reader.text("STARWIRE_BIND")? {
        Some(text) => vec![parse_bind(&text, mapped_port)?],
        None => default_bind(reached_as, mapped_port),
    };
    let advertise = match reader.text("STARWIRE_ADVERTISE")? {
        Some(text) => parse_advertise(&text)?,
        None => HostAndMaybePort {
            host: own_host(env, identity, reached_as, warnings)?,
            port: mapped.map(|data| data.port),
        },
    };
    let elsewhere = |address: &str| address.parse::<HostPort>().is_ok_and(|other| !is_loopback(&other.host));
    if map.is_none() && is_loopback(&advertise.host) && identity.tasks.iter().any(|(_, address)| elsewhere(address)) {
        warnings.push(format!(
            "peers on other hosts of this cluster will try to reach {} at {}; set STARWIRE_ADVERTISE to a host that they can reach",
            identity.task, advertise.host
        ));
    }
    Ok((bind, advertise))
}

/// A server whose own entry is 0.0.0.0 or [::] uses the name of its machine.
fn own_host(env: &dyn Env, identity: &Identity, host: &str, warnings: &mut Vec<String>) -> Result<String, ConfigError> {
    if !is_unspecified(host) {
        return Ok(host.to_owned());
    }
    let name = env.host_name().ok_or_else(|| ConfigError::ClusterAddress {
        task: identity.task.clone(),
        address: identity.grpc_address.clone(),
        reason: "peers cannot connect to it, and this machine has no host name; set STARWIRE_ADVERTISE".to_owned(),
    })?;
    warnings.push(format!("this task's ClusterSpec entry is {host}, so it advertises {name}; set STARWIRE_ADVERTISE if peers cannot reach that"));
    Ok(name)
}

fn parse_bind(text: &str, port: u16) -> Result<SocketAddr, ConfigError> {
    let bad = || ConfigError::Value {
        name: "STARWIRE_BIND",
        value: text.to_owned(),
        allowed: "an IP address of this machine, with or without a port (0.0.0.0, 10.0.0.7:7000, [::], [::1]:7000)"
            .to_owned(),
    };
    if let Ok(ip) = text.parse::<IpAddr>() {
        return Ok(SocketAddr::new(ip, port));
    }
    let parsed: HostAndMaybePort = text.parse().map_err(|_| bad())?;
    let ip: IpAddr = parsed.host.parse().map_err(|_| bad())?;
    Ok(SocketAddr::new(ip, parsed.port.unwrap_or(port)))
}

fn parse_advertise(text: &str) -> Result<HostAndMaybePort, ConfigError> {
    let name = "STARWIRE_ADVERTISE";
    let parsed = match text.parse::<IpAddr>() {
        Ok(ip) => Ok(HostAndMaybePort { host: ip.to_string(), port: None }),
        Err(_) => text.parse::<HostAndMaybePort>(),
    };
    let parsed = parsed.map_err(|error| ConfigError::Value {
        name,
        value: text.to_owned(),
        allowed: format!("host or host:port ({error})"),
    })?;
    if is_unspecified(&parsed.host) || parsed.port == Some(0) {
        let allowed = "an address that peers can connect to".to_owned();
        return Err(ConfigError::Value { name, value: text.to_owned(), allowed });
    }
    Ok(parsed)
}

fn cluster_id(reader: &mut Reader<'_>) -> Result<String, ConfigError> {
    let name = "STARWIRE_CLUSTER_ID";
    let text = reader.text(name)?.unwrap_or_default();
    if text.len() <= 128 && text.bytes().all(|b| b.is_ascii_graphic()) {
        return Ok(text);
    }
    Err(ConfigError::Value {
        name,
        value: text,
        allowed: "at most 128 printable ASCII characters without spaces".to_owned(),
    })
}

fn milliseconds(
    reader: &mut Reader<'_>,
    name: &'static str,
    default: u64,
    min: u64,
    max: u64,
) -> Result<Duration, ConfigError> {
    reader.number(name, default, min..=max).map(Duration::from_millis)
}

#[cfg(test)]
mod tests;
