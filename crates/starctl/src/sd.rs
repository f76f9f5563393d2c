//! `starctl sd`: where Prometheus finds the servers of a cluster.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use serde_json::json;
use starwire_engine::config::HostPort;

use crate::args::{Args, Command, Failure, Opt};
use crate::discover::{self, Target};
use crate::remote;

pub const COMMAND: Command = Command {
    name: "sd",
    about: "Lists the data ports of a cluster for Prometheus (file_sd).",
    positional: "[ADDRESS...]",
    options: &[
        discover::CLUSTER,
        Opt { name: "--output", value: "FILE", help: "write to this file, again and again, instead of printing once" },
        Opt { name: "--interval-ms", value: "N", help: "time between two updates of the file (15000)" },
        Opt { name: "--timeout-ms", value: "N", help: "time to wait for a server's answer (2000)" },
        Opt { name: "--label", value: "NAME=VALUE", help: "another label of every target; may be repeated" },
    ],
    details: "\
Servers choose new data ports when they restart. Give Prometheus the file, and run this beside it:

  starctl sd --cluster 'ps=ps0:2222,ps1:2222;worker=w0:2222' --output /etc/prometheus/starwire.json

  scrape_configs:
    - job_name: starwire
      file_sd_configs: [{files: [/etc/prometheus/starwire.json]}]

ADDRESS is host:port of a server: the one of the ClusterSpec, which is asked for its data port, or the data port.
Without an ADDRESS: all tasks of --cluster, or of $TF_CONFIG. The label `instance` is the address that was given, so
series survive a restart. A server that does not answer keeps its last known port, so that Prometheus' `up` is 0.
The file is replaced, never written in place. Without --output, the exit status is 0 only if all servers answered.
",
    run,
};

/// Labels that this command or Prometheus sets.
const TAKEN: [&str; 4] = ["instance", "starwire_job", "starwire_task", "job"];

struct Known {
    target: Target,
    data: Option<HostPort>,
    error: Option<String>,
}

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let timeout = Duration::from_millis(args.number("--timeout-ms", 2000, 1, 600_000)?);
    let interval = Duration::from_millis(args.number("--interval-ms", 15_000, 50, 3_600_000)?);
    let labels = args.all("--label").map(label).collect::<Result<Vec<_>, _>>()?;
    let targets = discover::targets(args)?;
    let mut known: Vec<Known> = targets.into_iter().map(|target| Known { target, data: None, error: None }).collect();
    let runtime = remote::runtime()?;
    let Some(output) = args.get("--output").map(PathBuf::from) else {
        runtime.block_on(ask(&mut known, timeout));
        print!("{}", render(&known, &labels));
        let well = known.iter().all(|one| one.error.is_none());
        return Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE });
    };
    let mut written = None;
    loop {
        runtime.block_on(ask(&mut known, timeout));
        let text = render(&known, &labels);
        // Prometheus reads the file again at each change of it.
        if written.as_ref() != Some(&text) {
            replace(&output, &text).map_err(|e| Failure::Failed(format!("{}: {e}", output.display())))?;
            written = Some(text);
        }
        std::thread::sleep(interval);
    }
}

fn label(text: &str) -> Result<(String, String), Failure> {
    let bad = |reason: &str| Failure::Usage(format!("--label {text:?} {reason}"));
    let (name, value) = text.split_once('=').ok_or_else(|| bad("must be NAME=VALUE"))?;
    let is_name = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    if !is_name {
        return Err(bad("does not begin with a label's name (letters, digits, '_')"));
    }
    if TAKEN.contains(&name) {
        return Err(bad("names a label that is set already"));
    }
    Ok((name.to_owned(), value.to_owned()))
}

/// Asks all servers at once. Complains about each one when it stops answering, not each time.
async fn ask(known: &mut [Known], timeout: Duration) {
    let mut questions = Vec::new();
    for one in known.iter() {
        let address = one.target.address.clone();
        questions.push(tokio::spawn(async move { discover::data_port(&address, timeout).await }));
    }
    for (one, question) in known.iter_mut().zip(questions) {
        match question.await.unwrap_or_else(|error| Err(error.to_string())) {
            Ok(data) => {
                if one.error.take().is_some() {
                    eprintln!("starctl sd: {} answers again", one.target.address);
                }
                one.data = Some(data);
            }
            Err(error) => {
                if one.error.is_none() {
                    eprintln!("starctl sd: {}: {error}", one.target.address);
                }
                one.error = Some(error);
            }
        }
    }
}

fn render(known: &[Known], labels: &[(String, String)]) -> String {
    let groups: Vec<serde_json::Value> = known
        .iter()
        .filter_map(|one| {
            let data = one.data.as_ref()?;
            let mut all = serde_json::Map::new();
            all.insert("instance".to_owned(), json!(one.target.address.to_string()));
            if let Some((job, index)) = &one.target.task {
                all.insert("starwire_job".to_owned(), json!(job));
                all.insert("starwire_task".to_owned(), json!(index.to_string()));
            }
            all.extend(labels.iter().map(|(name, value)| (name.clone(), json!(value))));
            Some(json!({"targets": [data.to_string()], "labels": all}))
        })
        .collect();
    // Two levels of JSON values always serialise.
    serde_json::to_string_pretty(&groups).unwrap_or_default() + "\n"
}

/// Prometheus never sees half a file.
fn replace(path: &Path, text: &str) -> std::io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{}", std::process::id()));
    let temporary = path.with_file_name(name);
    let written = std::fs::File::create(&temporary).and_then(|mut file| file.write_all(text.as_bytes()));
    let moved = written.and_then(|()| std::fs::rename(&temporary, path));
    if moved.is_err() {
        // Whatever went wrong is reported; there may be nothing to remove.
        let _ = std::fs::remove_file(&temporary);
    }
    moved
}

#[cfg(test)]
mod tests {
    use super::*;

    fn known(address: &str, task: Option<(&str, usize)>, data: Option<&str>) -> Known {
        let target =
            Target { address: address.parse().unwrap(), task: task.map(|(job, index)| (job.to_owned(), index)) };
        Known { target, data: data.map(|text| text.parse().unwrap()), error: None }
    }

    #[test]
    fn what_prometheus_reads() {
        let labels = [("cluster".to_owned(), "a \"b\"".to_owned())];
        let all = [
            known("ps0:2222", Some(("ps", 0)), Some("10.0.0.1:41873")),
            known("ps1:2222", Some(("ps", 1)), None),
            known("[::1]:5", None, Some("[::1]:5")),
        ];
        let parsed: serde_json::Value = serde_json::from_str(&render(&all, &labels)).unwrap();
        let first = json!({"instance": "ps0:2222", "starwire_job": "ps", "starwire_task": "0", "cluster": "a \"b\""});
        let second = json!({"instance": "[::1]:5", "cluster": "a \"b\""});
        assert_eq!(
            parsed,
            json!([{"targets": ["10.0.0.1:41873"], "labels": first}, {"targets": ["[::1]:5"], "labels": second}])
        );
        assert_eq!(render(&[], &[]), "[]\n");
    }

    #[test]
    fn labels_are_checked() {
        assert!(label("a=b=c").is_ok_and(|found| found == ("a".to_owned(), "b=c".to_owned())));
        for (text, reason) in [
            ("a", "must be NAME=VALUE"),
            ("1a=b", "does not begin with a label's name"),
            ("=b", "does not begin with a label's name"),
            ("job=b", "names a label that is set already"),
        ] {
            let Err(Failure::Usage(error)) = label(text) else { panic!("{text} is accepted") };
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn the_file_is_replaced_as_a_whole() {
        let folder = std::env::temp_dir().join(format!("starctl-sd-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("targets.json");
        replace(&path, "one").unwrap();
        let open = std::fs::File::open(&path).unwrap();
        replace(&path, "two").unwrap();
        assert_eq!(std::io::read_to_string(open).unwrap(), "one");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "two");
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1);
        assert!(replace(&folder.join("no/such.json"), "x").is_err());
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
