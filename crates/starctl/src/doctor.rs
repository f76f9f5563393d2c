//! `starctl doctor`: is this machine, and this environment, fit for starwire?

mod host;
mod rdma;
mod settings;

use std::process::ExitCode;

use serde_json::json;

use crate::args::{Args, Command, Failure, JSON, Opt};
use crate::cluster::{self, Cluster};

pub const COMMAND: Command = Command {
    name: "doctor",
    about: "Checks the machine, the environment and the endpoint map.",
    positional: "",
    options: &[
        cluster::CLUSTER,
        Opt { name: "--job", value: "NAME", help: "check as a task of this job (from $TF_CONFIG, else the first one)" },
        Opt { name: "--protocol", value: "NAME", help: "check for this protocol (grpc++)" },
        Opt { name: "--connect", value: "", help: "also connect to each data port" },
        JSON,
    ],
    details: "\
Without --cluster, the cluster is taken from $TF_CONFIG; without either, checks that need a cluster are skipped.
`ok` is fine, `note` may cost speed or a feature, `BAD` will fail. The exit status is 1 if anything is BAD.
",
    run,
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    Note,
    Bad,
}

/// One thing that was looked at.
#[derive(Debug)]
pub struct Finding {
    pub verdict: Verdict,
    pub subject: String,
    /// What was found, and for anything but `Ok` what to do.
    pub text: String,
}

impl Finding {
    pub fn ok(subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self { verdict: Verdict::Ok, subject: subject.into(), text: text.into() }
    }

    pub fn note(subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self { verdict: Verdict::Note, subject: subject.into(), text: text.into() }
    }

    pub fn bad(subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self { verdict: Verdict::Bad, subject: subject.into(), text: text.into() }
    }
}

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let tf_config = std::env::var("TF_CONFIG").ok();
    let cluster = Cluster::from_args(args, tf_config.as_deref())?;
    let mut findings = host::examine();
    findings.extend(settings::examine(args, cluster.as_ref())?);
    print!("{}", if args.has(JSON.name) { render_json(&findings) } else { render(&findings) });
    let bad = findings.iter().any(|f| f.verdict == Verdict::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn render(findings: &[Finding]) -> String {
    let width = findings.iter().map(|f| f.subject.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for finding in findings {
        let verdict = match finding.verdict {
            Verdict::Ok => "ok  ",
            Verdict::Note => "note",
            Verdict::Bad => "BAD ",
        };
        text += &format!("{verdict}  {:<width$}  {}\n", finding.subject, finding.text);
    }
    let count = |verdict| findings.iter().filter(|f| f.verdict == verdict).count();
    text + &format!("{} ok, {} notes, {} bad\n", count(Verdict::Ok), count(Verdict::Note), count(Verdict::Bad))
}

fn render_json(findings: &[Finding]) -> String {
    let of = |finding: &Finding| {
        let verdict = match finding.verdict {
            Verdict::Ok => "ok",
            Verdict::Note => "note",
            Verdict::Bad => "bad",
        };
        json!({"verdict": verdict, "subject": finding.subject, "text": finding.text})
    };
    format!("{:#}\n", findings.iter().map(of).collect::<serde_json::Value>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_line_up_and_are_counted() {
        let findings = [Finding::ok("a", "x"), Finding::note("long", "y"), Finding::bad("c", "z")];
        assert_eq!(render(&findings), "ok    a     x\nnote  long  y\nBAD   c     z\n1 ok, 1 notes, 1 bad\n");
        let parsed: serde_json::Value = serde_json::from_str(&render_json(&findings)).unwrap();
        assert_eq!(parsed[1], json!({"verdict": "note", "subject": "long", "text": "y"}));
    }
}
