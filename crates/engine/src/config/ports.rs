//! The ports of tasks: one or two, and where the data port of each is.

use std::net::{IpAddr, SocketAddr};

use super::address::{HostPort, default_bind, is_loopback};
use super::endpoint_map::{EndpointMap, FILE_NAME, MapLine};
use super::env::Env;
use super::error::ConfigError;
use super::protocol::Protocol;
use super::reader::Reader;
use super::{Config, Identity, Ports, PortsChoice, variables};

/// Where the data port of a task is.
#[derive(Clone, Debug)]
pub enum DataAddress {
    Mapped(MapLine),
    /// From the task's address in the ClusterSpec.
    Derived(HostPort),
}

impl DataAddress {
    pub fn address(&self) -> &HostPort {
        match self {
            Self::Mapped(line) => &line.data,
            Self::Derived(address) => address,
        }
    }

    /// For messages about the task with this address in the ClusterSpec: where its data port is, unless it is there.
    pub fn remark(&self, grpc_address: &str) -> String {
        match self {
            Self::Mapped(line) => format!(" ({line} gives data port {})", line.data),
            Self::Derived(address) if address.to_string() != grpc_address => format!(" (data port {address})"),
            Self::Derived(_) => String::new(),
        }
    }
}

impl Config {
    /// Where a task has its data port.
    pub fn data_address(&self, task: &str, grpc_address: &str) -> Result<DataAddress, ConfigError> {
        if let Some(map) = &self.endpoint_map {
            map.require([(task, grpc_address)])?;
            if let Some(line) = map.line(grpc_address) {
                return Ok(DataAddress::Mapped(line));
            }
        }
        let address = parse(task, grpc_address)?;
        derived(address, self.ports, self.port_offset).map(DataAddress::Derived)
    }

    /// Where the task with this address in the ClusterSpec has its data port, for tools: they do not know the version
    /// of TensorFlow, and may be given the data port itself, which a map does not have.
    pub fn data_address_from_env(env: &dyn Env, grpc_address: &HostPort) -> Result<DataAddress, ConfigError> {
        if let Some(map) = EndpointMap::find(env)? {
            let line = map.line(&grpc_address.to_string()).map(DataAddress::Mapped);
            return Ok(line.unwrap_or_else(|| DataAddress::Derived(grpc_address.clone())));
        }
        let reader = &mut Reader::new(env, Protocol::Grpc);
        let ports = if reader.get(&variables::PORTS)? == PortsChoice::Two { Ports::Two } else { Ports::One };
        derived(grpc_address.clone(), ports, reader.get(&variables::PORT_OFFSET)?).map(DataAddress::Derived)
    }
}

fn parse(task: &str, grpc_address: &str) -> Result<HostPort, ConfigError> {
    grpc_address.parse().map_err(|error: super::AddressError| ConfigError::ClusterAddress {
        task: task.to_owned(),
        address: grpc_address.to_owned(),
        reason: error.to_string(),
    })
}

/// The data address that follows from the one of the ClusterSpec.
fn derived(address: HostPort, ports: Ports, offset: u16) -> Result<HostPort, ConfigError> {
    match ports {
        // The system chooses both ports.
        Ports::Two if address.port == 0 => Ok(address),
        Ports::Two => match address.port.checked_add(offset) {
            Some(port) => Ok(HostPort { port, ..address }),
            None => Err(ConfigError::NoDataPort { address: address.to_string(), offset }),
        },
        Ports::One => Ok(address),
    }
}

pub(super) fn choose(choice: PortsChoice, identity: &Identity, map: Option<&EndpointMap>) -> Ports {
    let own = identity.grpc_address.parse::<HostPort>().ok().map(|own| own.port);
    let mapped = map.and_then(|map| map.get(&identity.grpc_address)).map(|data| data.port);
    let has_another = mapped.is_some() && mapped != own;
    match choice {
        PortsChoice::One => Ports::One,
        PortsChoice::Auto if identity.grpc_gives_way && !has_another => Ports::One,
        PortsChoice::Auto | PortsChoice::Two => Ports::Two,
    }
}

/// What decides where a server listens.
pub(super) struct Listener<'a> {
    pub identity: &'a Identity,
    pub map: Option<&'a EndpointMap>,
    pub ports: Ports,
    pub offset: u16,
    /// From `STARWIRE_BIND`.
    pub chosen: Option<(IpAddr, Option<u16>)>,
}

impl Listener<'_> {
    /// The addresses to listen on, and the host by which peers know the task.
    pub fn addresses(&self) -> Result<(Vec<SocketAddr>, String), ConfigError> {
        let Self { identity, map, ports, offset, chosen } = *self;
        let own = parse(&identity.task, &identity.grpc_address)?;
        let mapped = map.and_then(|map| map.line(&identity.grpc_address));
        let port = match (&mapped, ports) {
            (Some(line), Ports::Two) => line.data.port,
            (None, Ports::Two) => derived(own.clone(), ports, offset)?.port,
            (_, Ports::One) => own.port,
        };
        if map.is_none() {
            self.check_cluster()?;
        }
        self.check_port(&own, mapped.as_ref(), port)?;
        let reached_as = mapped.as_ref().map_or(own.host.as_str(), |line| line.data.host.as_str());
        let is_elsewhere = |address: &str| address.parse::<HostPort>().is_ok_and(|other| !is_loopback(&other.host));
        let is_spread = identity.tasks.iter().any(|(task, address)| *task != identity.task && is_elsewhere(address));
        let is_known_elsewhere = is_spread && (ports == Ports::One || mapped.is_none());
        let bind = match chosen {
            Some((ip, chosen)) => vec![SocketAddr::new(ip, chosen.unwrap_or(port))],
            // Peers know a task that calls itself localhost by another name.
            None if is_known_elsewhere && is_loopback(reached_as) => default_bind("0.0.0.0", port),
            None => default_bind(reached_as, port),
        };
        Ok((bind, reached_as.to_owned()))
    }

    /// Every task must have a data port. TensorFlow itself reports addresses that are none.
    fn check_cluster(&self) -> Result<(), ConfigError> {
        let mut addresses = self.identity.tasks.iter().filter_map(|(_, address)| address.parse::<HostPort>().ok());
        addresses.try_for_each(|address| derived(address, self.ports, self.offset).map(drop))
    }

    /// Neither the map nor `STARWIRE_BIND` may name a port at which peers would not look.
    fn check_port(&self, own: &HostPort, mapped: Option<&MapLine>, port: u16) -> Result<(), ConfigError> {
        let conflict = |first, second, reason| Err(ConfigError::Conflict { first, second, reason });
        let task = &self.identity.task;
        let only = format!("for {task}, whose only port is {port}, the one of its ClusterSpec entry");
        if let Some(line) = mapped.filter(|line| self.ports == Ports::One && line.data.port != port) {
            let reason = format!("{line} gives data port {} {only}", line.data);
            return conflict(variables::PORTS.name, FILE_NAME, reason);
        }
        let chosen = self.chosen.and_then(|(_, chosen)| chosen).filter(|chosen| *chosen != port && own.port != 0);
        match (chosen, self.ports) {
            (Some(chosen), Ports::One) => {
                conflict(variables::PORTS.name, variables::BIND.name, format!("port {chosen} was chosen {only}"))
            }
            (Some(chosen), Ports::Two) if mapped.is_none() => {
                let reason =
                    format!("port {chosen} was chosen for {task}, whose peers look for its data port at {port}");
                conflict(variables::PORT_OFFSET.name, variables::BIND.name, reason)
            }
            _ => Ok(()),
        }
    }
}
