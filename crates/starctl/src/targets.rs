//! The servers of a command line, and where each answers.

use starwire_engine::config::{Config, ConfigError, DataAddress, Env, HostPort};

use crate::cluster::{self, ClusterOption};
use crate::failure::Failure;

/// For the help of commands with [`Servers`].
pub const DETAILS: &str = "\
ADDRESS is host:port of a server, as in the ClusterSpec. The endpoint map, and STARWIRE_PORTS=two
with STARWIRE_PORT_OFFSET, tell where its data port is, as for a server; set them as there.
Without an ADDRESS: all tasks of --cluster, or of $TF_CONFIG.";

#[derive(clap::Args)]
#[cfg_attr(test, derive(Default))]
pub struct Servers {
    /// host:port of a server
    #[arg(value_name = "ADDRESS", value_parser = cluster::address, conflicts_with = "cluster")]
    addresses: Vec<HostPort>,
    #[command(flatten)]
    cluster: ClusterOption,
}

#[derive(Clone, Debug)]
pub struct Target {
    /// As it was given.
    pub address: HostPort,
    /// Of the data port, which has the control service.
    pub data: DataAddress,
}

impl Servers {
    /// The addresses, else the cluster's tasks.
    pub fn targets(&self, env: &dyn Env) -> Result<Vec<Target>, Failure> {
        let addresses = if self.addresses.is_empty() {
            let none = || Failure::Usage("no server: give addresses or --cluster, or set TF_CONFIG".to_owned());
            self.cluster.read(env)?.ok_or_else(none)?.tasks.into_iter().map(|task| task.address).collect()
        } else {
            self.addresses.clone()
        };
        addresses.into_iter().map(|address| Target::new(address, env)).collect()
    }
}

impl Target {
    fn new(address: HostPort, env: &dyn Env) -> Result<Self, Failure> {
        match Config::data_address_from_env(env, &address) {
            Ok(data) => Ok(Self { address, data }),
            Err(error @ ConfigError::NoDataPort { .. }) => Err(Failure::Failed(format!("{error}{}", remedy(&address)))),
            Err(error) => Err(error.into()),
        }
    }

    /// An error, with the data port that was tried if it is not the address that was given.
    pub fn explain(&self, error: &str) -> String {
        let Self { address, data } = self;
        let remark = data.remark(&address.to_string());
        match data {
            DataAddress::Derived(data) if data != address => format!("{error}{remark}{}", remedy(address)),
            _ => format!("{error}{remark}"),
        }
    }
}

/// For an address that was taken for one of the ClusterSpec because of STARWIRE_PORTS=two.
fn remedy(address: &HostPort) -> String {
    format!("; if {address} is the data port itself, set STARWIRE_PORTS=one")
}

#[cfg(test)]
mod tests {
    use starwire_engine::config::MapEnv;

    use super::*;

    fn targets(addresses: &[&str], env: &MapEnv) -> Result<Vec<Target>, String> {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        let servers = Servers { addresses, ..Servers::default() };
        servers.targets(env).map_err(|failure| failure.report().unwrap().0)
    }

    fn found(addresses: &[&str], env: &MapEnv) -> Vec<String> {
        let show = |target: &Target| format!("{} {}", target.address, target.data.address());
        targets(addresses, env).unwrap().iter().map(show).collect()
    }

    fn env() -> MapEnv {
        MapEnv::new("/nowhere")
    }

    #[test]
    fn addresses_come_before_the_cluster() {
        let config = env().set("TF_CONFIG", r#"{"cluster": {"ps": ["a:1"], "worker": ["b:2"]}}"#);
        assert_eq!(found(&["c:3"], &config), ["c:3 c:3"]);
        assert_eq!(found(&[], &config), ["a:1 a:1", "b:2 b:2"]);
        assert_eq!(targets(&[], &env()).unwrap_err(), "no server: give addresses or --cluster, or set TF_CONFIG");
    }

    #[test]
    fn data_ports_follow_from_the_environment() {
        let two = env().set("STARWIRE_PORTS", "two");
        assert_eq!(found(&["a:1"], &two), ["a:1 a:1001"]);
        assert_eq!(found(&["a:1"], &two.clone().set("STARWIRE_PORT_OFFSET", "5")), ["a:1 a:6"]);
        let path = std::env::temp_dir().join(format!("starctl-targets-{}", std::process::id()));
        std::fs::write(&path, "a:1=b:7\n").unwrap();
        let env = two.set("STARWIRE_ENDPOINT_MAP", &path);
        // What the map does not have is a data port, such as that of this host by its other name.
        let mapped = targets(&["a:1", "b:7", "localhost:7"], &env);
        std::fs::remove_file(&path).unwrap();
        let mapped = mapped.unwrap();
        let data: Vec<_> = mapped.iter().map(|target| target.data.address().to_string()).collect();
        assert_eq!(data, ["b:7", "b:7", "localhost:7"]);
        let expected = format!("refused ({}:1 gives data port b:7)", path.display());
        assert_eq!([mapped[0].explain("refused"), mapped[1].explain("refused")], [expected, "refused".to_owned()]);
    }

    #[test]
    fn a_data_port_that_is_taken_for_an_address_of_the_cluster_is_explained() {
        let two = env().set("STARWIRE_PORTS", "two");
        assert_eq!(
            targets(&["a:3222"], &two).unwrap()[0].explain("refused"),
            "refused (data port a:4222); if a:3222 is the data port itself, set STARWIRE_PORTS=one"
        );
        let error = targets(&["a:65000"], &two).unwrap_err();
        assert!(error.ends_with("exceed 65535 together; if a:65000 is the data port itself, set STARWIRE_PORTS=one"));
        assert_eq!(found(&["a:65000"], &two.set("STARWIRE_PORTS", "one")), ["a:65000 a:65000"]);
    }
}
