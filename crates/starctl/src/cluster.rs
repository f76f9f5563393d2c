//! A cluster as the command line or `TF_CONFIG` describes it.

use starwire_engine::config::HostPort;

use crate::args::{Args, Failure, Opt};

pub const CLUSTER: Opt = Opt {
    name: "--cluster",
    value: "JOB=HOST:PORT,...",
    help: "a job and its tasks; once per job (or ';' between jobs)",
};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Task {
    pub job: String,
    pub index: usize,
    /// As it stands in the ClusterSpec.
    pub address: String,
}

impl Task {
    pub fn name(&self) -> String {
        format!("/job:{}/replica:0/task:{}", self.job, self.index)
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Cluster {
    pub tasks: Vec<Task>,
    /// Who we are, if TF_CONFIG says so.
    pub own: Option<usize>,
}

impl Cluster {
    /// From `--cluster`, else from `TF_CONFIG`, else `None`.
    pub fn from_args(args: &Args, tf_config: Option<&str>) -> Result<Option<Self>, Failure> {
        let jobs: Vec<&str> =
            args.all(CLUSTER.name).flat_map(|text| text.split(';')).filter(|job| !job.trim().is_empty()).collect();
        if jobs.is_empty() {
            return match tf_config {
                Some(text) => {
                    Self::from_tf_config(text).map(Some).map_err(|e| Failure::Failed(format!("TF_CONFIG: {e}")))
                }
                None if args.has(CLUSTER.name) => Err(Failure::Usage("--cluster is empty".to_owned())),
                None => Ok(None),
            };
        }
        let mut cluster = Self::default();
        for job in jobs {
            let (name, addresses) = job
                .split_once('=')
                .ok_or_else(|| Failure::Usage(format!("--cluster {job:?} must be JOB=HOST:PORT,...")))?;
            for (index, address) in addresses.split(',').enumerate() {
                cluster
                    .add(name.trim(), index, address.trim())
                    .map_err(|e| Failure::Usage(format!("--cluster: {e}")))?;
            }
        }
        Ok(Some(cluster))
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

    fn add(&mut self, job: &str, index: usize, address: &str) -> Result<(), String> {
        let task = Task { job: job.to_owned(), index, address: address.to_owned() };
        let is_name = job.starts_with(|c: char| c.is_ascii_alphabetic())
            && job.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !is_name {
            return Err(format!("{job:?} is not a job name (letters, digits, '_')"));
        }
        address.parse::<HostPort>().map_err(|e| format!("{}: {address:?}: {e}", task.name()))?;
        if let Some(other) = self.tasks.iter().find(|t| t.address == address || (t.job == job && t.index == index)) {
            return Err(match other.address == address {
                true => format!("{} and {} have the same address {address}", other.name(), task.name()),
                false => format!("{} is listed twice", task.name()),
            });
        }
        self.tasks.push(task);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Parsed, parse};

    fn from(words: &[&str], tf_config: Option<&str>) -> Result<Option<Cluster>, String> {
        let words: Vec<String> = words.iter().map(|w| (*w).to_owned()).collect();
        let Ok(Parsed::Run(args)) = parse(&crate::endpoint_map::COMMAND, &words) else { panic!("bad words") };
        Cluster::from_args(&args, tf_config).map_err(|e| match e {
            Failure::Usage(e) | Failure::Failed(e) => e,
        })
    }

    fn addresses(cluster: &Cluster) -> Vec<String> {
        cluster.tasks.iter().map(|t| format!("{} {}", t.name(), t.address)).collect()
    }

    #[test]
    fn from_the_command_line() {
        let c = from(&["--cluster", "ps=a:1,b:2", "--cluster", "worker=[::1]:3;chief=d:4"], Some("ignored"))
            .unwrap()
            .unwrap();
        assert_eq!(
            addresses(&c),
            [
                "/job:ps/replica:0/task:0 a:1",
                "/job:ps/replica:0/task:1 b:2",
                "/job:worker/replica:0/task:0 [::1]:3",
                "/job:chief/replica:0/task:0 d:4"
            ]
        );
        assert_eq!(from(&[], None), Ok(None));
    }

    #[test]
    fn from_tf_config() {
        let text = r#"{"cluster": {"ps": ["a:1"], "worker": {"3": "b:2"}}, "task": {"type": "worker", "index": "3"}}"#;
        let c = from(&[], Some(text)).unwrap().unwrap();
        assert_eq!(addresses(&c), ["/job:ps/replica:0/task:0 a:1", "/job:worker/replica:0/task:3 b:2"]);
        assert_eq!(c.own, Some(1));
    }

    #[test]
    fn mistakes_are_explained() {
        for (words, tf_config, error) in [
            (&["--cluster", "ps"][..], None, "--cluster \"ps\" must be JOB=HOST:PORT,..."),
            (&["--cluster", ""], None, "--cluster is empty"),
            (
                &["--cluster", "ps=a"],
                None,
                "--cluster: /job:ps/replica:0/task:0: \"a\": the port is missing (host:port)",
            ),
            (&["--cluster", "p s=a:1"], None, "--cluster: \"p s\" is not a job name (letters, digits, '_')"),
            (
                &["--cluster", "ps=a:1;worker=a:1"],
                None,
                "--cluster: /job:ps/replica:0/task:0 and /job:worker/replica:0/task:0 have the same address a:1",
            ),
            (&["--cluster", "ps=a:1;ps=b:1"], None, "--cluster: /job:ps/replica:0/task:0 is listed twice"),
            (&[], Some("{}"), "TF_CONFIG: \"cluster\" is missing"),
            (&[], Some(r#"{"cluster": {"ps": 1}}"#), "TF_CONFIG: job \"ps\" is neither a list nor a map of addresses"),
            (&[], Some(r#"{"cluster": {"ps": [1]}}"#), "TF_CONFIG: job \"ps\": an address is not a string"),
            (&[], Some(r#"{"cluster": {"ps": {"x": "a:1"}}}"#), "TF_CONFIG: job \"ps\": \"x\" is not a task number"),
        ] {
            assert_eq!(from(words, tf_config).unwrap_err(), error);
        }
        assert!(from(&[], Some("nonsense")).unwrap_err().starts_with("TF_CONFIG: not JSON: "));
    }
}
