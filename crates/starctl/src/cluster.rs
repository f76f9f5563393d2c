//! A cluster as the command line or `TF_CONFIG` describes it.

use starwire_engine::config::{AddressError, Env, HostPort};

use crate::failure::Failure;

#[derive(clap::Args)]
#[cfg_attr(test, derive(Default))]
pub struct ClusterOption {
    /// A job and its tasks; once per job, or ';' between jobs [default: the cluster of $TF_CONFIG]
    #[arg(long, value_name = "JOB=HOST:PORT,...")]
    pub cluster: Vec<String>,
}

impl ClusterOption {
    /// From `--cluster`, else from `TF_CONFIG`, else `None`.
    pub fn read(&self, env: &dyn Env) -> Result<Option<Cluster>, Failure> {
        if !self.cluster.is_empty() {
            let cluster = Cluster::parse(&self.cluster).map_err(|e| Failure::Usage(format!("--cluster: {e}")))?;
            return Ok(Some(cluster));
        }
        let Some(text) = env.var("TF_CONFIG") else { return Ok(None) };
        let cluster = Cluster::from_tf_config(&text.to_string_lossy());
        let cluster = cluster.map_err(|e| Failure::Failed(format!("TF_CONFIG: {e}")))?;
        // A program of one task has an empty cluster.
        Ok(Some(cluster).filter(|cluster| !cluster.tasks.is_empty()))
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    pub job: String,
    pub index: usize,
    /// In the ClusterSpec.
    pub address: HostPort,
}

impl Task {
    pub fn name(&self) -> String {
        format!("/job:{}/replica:0/task:{}", self.job, self.index)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    pub tasks: Vec<Task>,
    /// The task of this process, if TF_CONFIG names it.
    pub own: Option<usize>,
}

/// An address to connect to.
pub fn address(text: &str) -> Result<HostPort, String> {
    let address: HostPort = text.parse().map_err(|error: AddressError| error.to_string())?;
    if address.port == 0 { Err("the port is 0".to_owned()) } else { Ok(address) }
}

impl Cluster {
    /// From the values of `--cluster`.
    pub fn parse(options: &[String]) -> Result<Self, String> {
        let mut cluster = Self::default();
        for job in options.iter().flat_map(|text| text.split(';')).filter(|job| !job.trim().is_empty()) {
            let (name, addresses) = job.split_once('=').ok_or_else(|| format!("{job:?} must be JOB=HOST:PORT,..."))?;
            for (index, address) in addresses.split(',').enumerate() {
                cluster.add(name.trim(), index, address.trim())?;
            }
        }
        if cluster.tasks.is_empty() { Err("it names no job".to_owned()) } else { Ok(cluster) }
    }

    fn from_tf_config(text: &str) -> Result<Self, String> {
        let config: serde_json::Value = serde_json::from_str(text).map_err(|e| format!("not JSON: {e}"))?;
        let jobs = config.get("cluster").and_then(|c| c.as_object()).ok_or("\"cluster\" is missing")?;
        let mut cluster = Self::default();
        for (job, tasks) in jobs {
            let not_text = || format!("job {job:?}: an address is not a string");
            if let Some(list) = tasks.as_array() {
                for (index, address) in list.iter().enumerate() {
                    cluster.add(job, index, address.as_str().ok_or_else(not_text)?)?;
                }
            } else if let Some(map) = tasks.as_object() {
                for (index, address) in map {
                    let number = index.parse().map_err(|_| format!("job {job:?}: {index:?} is not a task number"))?;
                    cluster.add(job, number, address.as_str().ok_or_else(not_text)?)?;
                }
            } else {
                return Err(format!("job {job:?} is neither a list nor a map of addresses"));
            }
        }
        if let Some(task) = config.get("task") {
            let job = task.get("type").and_then(|t| t.as_str());
            // Some launchers write the index as a string.
            let index = task.get("index").and_then(|i| i.as_u64().or_else(|| i.as_str()?.parse().ok()));
            let is_own = |t: &Task| job == Some(t.job.as_str()) && index == u64::try_from(t.index).ok();
            cluster.own = cluster.tasks.iter().position(is_own);
        }
        Ok(cluster)
    }

    fn add(&mut self, job: &str, index: usize, text: &str) -> Result<(), String> {
        let is_name = job.starts_with(|c: char| c.is_ascii_alphabetic())
            && job.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !is_name {
            return Err(format!("{job:?} is not a job name (letters, digits, '_')"));
        }
        let name = format!("/job:{job}/replica:0/task:{index}");
        let address = address(text).map_err(|e| format!("{name}: {text:?}: {e}"))?;
        if let Some(other) = self.tasks.iter().find(|t| t.address == address) {
            return Err(format!("{} and {name} have the same address {address}", other.name()));
        }
        if self.tasks.iter().any(|t| t.job == job && t.index == index) {
            return Err(format!("{name} is listed twice"));
        }
        self.tasks.push(Task { job: job.to_owned(), index, address });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use starwire_engine::config::MapEnv;

    use super::*;

    fn read(options: &[&str], tf_config: Option<&str>) -> Result<Option<Cluster>, String> {
        let env = MapEnv::new("/nowhere");
        let env = tf_config.map_or_else(|| env.clone(), |text| env.clone().set("TF_CONFIG", text));
        let options = ClusterOption { cluster: options.iter().map(|text| (*text).to_owned()).collect() };
        options.read(&env).map_err(|failure| failure.report().unwrap().0)
    }

    fn addresses(cluster: &Cluster) -> Vec<String> {
        cluster.tasks.iter().map(|t| format!("{} {}", t.name(), t.address)).collect()
    }

    #[test]
    fn from_the_command_line() {
        let c = read(&["ps=a:1,b:2", "worker=[::1]:3;chief=d:4"], Some("ignored")).unwrap().unwrap();
        assert_eq!(
            addresses(&c),
            [
                "/job:ps/replica:0/task:0 a:1",
                "/job:ps/replica:0/task:1 b:2",
                "/job:worker/replica:0/task:0 [::1]:3",
                "/job:chief/replica:0/task:0 d:4"
            ]
        );
        assert_eq!(read(&[], None), Ok(None));
    }

    #[test]
    fn from_tf_config() {
        let text = r#"{"cluster": {"ps": ["a:1"], "worker": {"3": "b:2"}}, "task": {"type": "worker", "index": "3"}}"#;
        let c = read(&[], Some(text)).unwrap().unwrap();
        assert_eq!(addresses(&c), ["/job:ps/replica:0/task:0 a:1", "/job:worker/replica:0/task:3 b:2"]);
        assert_eq!(c.own, Some(1));
        assert_eq!(read(&[], Some(r#"{"cluster": {}}"#)), Ok(None));
    }

    #[test]
    fn mistakes_are_explained() {
        for (options, tf_config, error) in [
            (&["ps"][..], None, "--cluster: \"ps\" must be JOB=HOST:PORT,..."),
            (&[""], None, "--cluster: it names no job"),
            (&["ps=a"], None, "--cluster: /job:ps/replica:0/task:0: \"a\": the port is missing (host:port)"),
            (&["ps=a:0"], None, "--cluster: /job:ps/replica:0/task:0: \"a:0\": the port is 0"),
            (&["p s=a:1"], None, "--cluster: \"p s\" is not a job name (letters, digits, '_')"),
            (
                &["ps=a:1;worker=a:1"],
                None,
                "--cluster: /job:ps/replica:0/task:0 and /job:worker/replica:0/task:0 have the same address a:1",
            ),
            (&["ps=a:1;ps=b:1"], None, "--cluster: /job:ps/replica:0/task:0 is listed twice"),
            (&[], Some("{}"), "TF_CONFIG: \"cluster\" is missing"),
            (&[], Some(r#"{"cluster": {"ps": 1}}"#), "TF_CONFIG: job \"ps\" is neither a list nor a map of addresses"),
            (&[], Some(r#"{"cluster": {"ps": [1]}}"#), "TF_CONFIG: job \"ps\": an address is not a string"),
            (&[], Some(r#"{"cluster": {"ps": {"x": "a:1"}}}"#), "TF_CONFIG: job \"ps\": \"x\" is not a task number"),
        ] {
            assert_eq!(read(options, tf_config).unwrap_err(), error);
        }
        assert!(read(&[], Some("nonsense")).unwrap_err().starts_with("TF_CONFIG: not JSON: "));
    }
}
