//! The servers that a command line means, and where each answers.

use starwire_engine::config::{Config, Env, HostPort, ProcessEnv};

use crate::args::{Args, Failure};
use crate::cluster::{self, Cluster};
use crate::remote;

pub const CLUSTER: crate::args::Opt = cluster::CLUSTER;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// As it was given.
    pub address: HostPort,
    /// Of the data port, which has the control service.
    pub data: HostPort,
}

/// The servers that are meant: the addresses, else the cluster's tasks.
pub fn targets(args: &Args) -> Result<Vec<Target>, Failure> {
    from(args, &ProcessEnv)
}

fn from(args: &Args, env: &dyn Env) -> Result<Vec<Target>, Failure> {
    let addresses: Vec<String> = if args.positional.is_empty() {
        let none = || Failure::Usage("no server: give addresses or --cluster, or set TF_CONFIG".to_owned());
        let tf_config = env.var("TF_CONFIG").and_then(|text| text.into_string().ok());
        let cluster = Cluster::from_args(args, tf_config.as_deref())?.ok_or_else(none)?;
        cluster.tasks.into_iter().map(|task| task.address).collect()
    } else if args.has(CLUSTER.name) {
        return Err(Failure::Usage("addresses and --cluster exclude each other".to_owned()));
    } else {
        args.positional.clone()
    };
    let target = |text: &String| {
        let address = remote::parse_address(text)?;
        let data = Config::data_address_from_env(env, &address).map_err(|error| Failure::Failed(error.to_string()))?;
        Ok(Target { address, data })
    };
    addresses.iter().map(target).collect()
}

#[cfg(test)]
mod tests {
    use crate::args::{Parsed, parse};
    use starwire_engine::config::MapEnv;

    fn from(words: &[&str], env: &MapEnv) -> Result<Vec<String>, String> {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let Ok(Parsed::Run(args)) = parse(&crate::health::COMMAND, &words) else { panic!("bad words") };
        let found = super::from(&args, env).map_err(|e| e.to_string())?;
        Ok(found.iter().map(|t| format!("{} {}", t.address, t.data)).collect())
    }

    fn env() -> MapEnv {
        MapEnv::new("/nowhere")
    }

    #[test]
    fn addresses_come_before_the_cluster() {
        let config = env().set("TF_CONFIG", r#"{"cluster": {"ps": ["a:1"], "worker": ["b:2"]}}"#);
        assert_eq!(from(&["c:3"], &config).unwrap(), ["c:3 c:3"]);
        assert_eq!(from(&[], &config).unwrap(), ["a:1 a:1", "b:2 b:2"]);
        assert_eq!(from(&["--cluster", "ps=x:1,y:1"], &config).unwrap(), ["x:1 x:1", "y:1 y:1"]);
        assert_eq!(from(&[], &env()).unwrap_err(), "no server: give addresses or --cluster, or set TF_CONFIG");
        let both = from(&["c:3", "--cluster", "ps=x:1"], &env());
        assert_eq!(both.unwrap_err(), "addresses and --cluster exclude each other");
    }

    #[test]
    fn data_ports_follow_from_the_environment() {
        let two = env().set("STARWIRE_PORTS", "two");
        assert_eq!(from(&["a:1"], &two).unwrap(), ["a:1 a:1001"]);
        assert_eq!(from(&["a:1"], &two.clone().set("STARWIRE_PORT_OFFSET", "5")).unwrap(), ["a:1 a:6"]);
        assert!(from(&["a:65000"], &two).unwrap_err().contains("no data port for the ClusterSpec address a:65000"));
        let path = std::env::temp_dir().join(format!("starctl-targets-{}", std::process::id()));
        std::fs::write(&path, "a:1=b:7\n").unwrap();
        let mapped = from(&["a:1", "b:7"], &env().set("STARWIRE_ENDPOINT_MAP", &path));
        std::fs::remove_file(&path).unwrap();
        assert_eq!(mapped.unwrap(), ["a:1 b:7", "b:7 b:7"]);
    }
}
