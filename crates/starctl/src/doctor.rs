//! `starctl doctor`: is this machine, and this environment, fit for starwire?

mod host;
mod rdma;
mod settings;

use std::process::ExitCode;

use serde_json::json;

use starwire_engine::config::{ProcessEnv, Protocol};

use crate::cluster::ClusterOption;
use crate::failure::Failure;
use crate::output::{print, unless_unread};

/// Check the machine, the environment and the endpoint map
#[derive(clap::Args)]
#[command(after_help = "\
Without a cluster, checks that need one are skipped.
`ok` is fine, `note` may cost speed or a feature, `BAD` will fail.
The exit status is 1 if anything is BAD.")]
pub struct Args {
    #[command(flatten)]
    cluster: ClusterOption,
    /// Check as a task of this job [default: that of $TF_CONFIG, else the first one]
    #[arg(long, value_name = "NAME")]
    job: Option<String>,
    /// Check for this protocol [default: that of $STARWIRE_PROTOCOL, else grpc++]
    #[arg(long, value_name = "NAME")]
    protocol: Option<Protocol>,
    /// Also connect to each data port
    #[arg(long)]
    connect: bool,
    /// Print JSON, for programs
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Ok,
    Note,
    Bad,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Note => "note",
            Self::Bad => "BAD",
        }
    }
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

    /// `Ok` with the first text, or a note with the second.
    pub fn ok_if(is_ok: bool, subject: &str, ok: String, note: String) -> Self {
        if is_ok { Self::ok(subject, ok) } else { Self::note(subject, note) }
    }

    pub fn note(subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self { verdict: Verdict::Note, subject: subject.into(), text: text.into() }
    }

    pub fn bad(subject: impl Into<String>, text: impl Into<String>) -> Self {
        Self { verdict: Verdict::Bad, subject: subject.into(), text: text.into() }
    }
}

pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let cluster = args.cluster.read(&ProcessEnv)?;
    let mut findings = host::examine();
    findings.extend(settings::examine(args, cluster.as_ref())?);
    unless_unread(print(if args.json { render_json(&findings) } else { render(&findings) }))?;
    let bad = findings.iter().any(|f| f.verdict == Verdict::Bad);
    Ok(if bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn render(findings: &[Finding]) -> String {
    let width = findings.iter().map(|f| f.subject.chars().count()).max().unwrap_or(0);
    let mut text = String::new();
    for Finding { verdict, subject, text: found } in findings {
        text += &format!("{:<4}  {subject:<width$}  {found}\n", verdict.name());
    }
    let count = |verdict| findings.iter().filter(|f| f.verdict == verdict).count();
    text + &format!("{} ok, {} notes, {} bad\n", count(Verdict::Ok), count(Verdict::Note), count(Verdict::Bad))
}

fn render_json(findings: &[Finding]) -> String {
    let of = |Finding { verdict, subject, text }: &Finding| json!({"verdict": verdict.name().to_lowercase(), "subject": subject, "text": text});
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
