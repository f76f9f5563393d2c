//! The command line.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::str::FromStr;

#[derive(Debug, PartialEq)]
pub enum Failure {
    /// The command line is wrong.
    Usage(String),
    Failed(String),
}

struct Opt {
    /// With the dashes.
    name: &'static str,
    /// Stands for the value in the help.
    value: &'static str,
    help: &'static str,
}

const fn opt(name: &'static str, value: &'static str, help: &'static str) -> Opt {
    Opt { name, value, help }
}

const OPTIONS: [Opt; 10] = [
    opt("--recording", "FILE", "recorded steps, from benches/swarm/record.py"),
    opt("--protocol", "NAME", "grpc, grpc++, star_server or star_server_lite"),
    opt("--server", "ADDRESS", "the server: its gRPC port for grpc, else its data port"),
    opt("--workers", "N", "simulated workers (1)"),
    opt("--first-worker", "IP:PORT", "address of worker 0; worker N listens N IP addresses higher"),
    opt("--steps", "N", "least steps per worker (5)"),
    opt("--seconds", "N", "least duration (5)"),
    opt("--pid", "PID", "the server's process, to measure its memory and CPU"),
    opt("--outage", "SECONDS", "expect the server's loss and its successor at the same address; then --steps again"),
    opt("--patience", "SECONDS", "silence after which a worker gives up (120)"),
];

const DETAILS: &str = "\
Each worker has its own session, task and (except with the star protocols) registered graph, and repeats the recorded
steps as fast as the server allows. Prints one JSON object. benches/swarm/run.py starts servers, compares protocols and
checks that the server applied the pushed updates.
The server's ClusterSpec (and, except for grpc, its .endpoint_map) must list --first-worker and the addresses after it;
one listener serves them all.
Exit status: 0 success, 1 failure, 2 wrong command line.
";

pub fn help() -> String {
    let mut text = "Simulates many workers on one real parameter server.\n\nusage: swarm [OPTIONS]\n\n".to_owned();
    for Opt { name, value, help } in OPTIONS {
        text += &format!("  {:<28}{help}\n", format!("{name} {value}"));
    }
    text + &format!("  {:<28}this text\n\n{DETAILS}", "--help")
}

#[derive(Debug)]
pub struct Args(HashMap<&'static str, String>);

impl Args {
    /// `None`: the help is requested.
    pub fn parse(words: impl IntoIterator<Item = OsString>) -> Result<Option<Self>, Failure> {
        let mut given = HashMap::new();
        let mut words = words.into_iter().map(|word| {
            word.into_string().map_err(|raw| Failure::Usage(format!("the argument {raw:?} is not UTF-8 text")))
        });
        while let Some(word) = words.next().transpose()? {
            if word == "--help" || word == "-h" {
                return Ok(None);
            }
            if !word.starts_with('-') {
                return Err(Failure::Usage(format!("unexpected argument {word:?}")));
            }
            let (name, inline) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            let Some(option) = OPTIONS.iter().find(|option| option.name == name) else {
                let known = OPTIONS.map(|option| option.name).join(", ");
                return Err(Failure::Usage(format!("unknown option {name}; known: {known}")));
            };
            let value = match inline {
                None => words.next().transpose()?,
                inline => inline,
            };
            let missing = || Failure::Usage(format!("{name} needs a value: {name} {}", option.value));
            given.insert(option.name, value.ok_or_else(missing)?);
        }
        Ok(Some(Self(given)))
    }

    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub fn needed(&self, name: &str) -> Result<&str, Failure> {
        self.get(name).ok_or_else(|| Failure::Usage(format!("{name} is missing")))
    }

    /// A value within a range.
    pub fn number<T>(&self, name: &str, default: T, min: T, max: T) -> Result<T, Failure>
    where
        T: FromStr + PartialOrd + Display,
    {
        let Some(text) = self.get(name) else { return Ok(default) };
        let number = text.parse::<T>().ok().filter(|n| (&min..=&max).contains(&n));
        number.ok_or_else(|| Failure::Usage(format!("{name} {text:?} must be a number from {min} to {max}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(words: &str) -> Result<Option<Args>, Failure> {
        Args::parse(words.split_whitespace().map(OsString::from))
    }

    #[test]
    fn the_last_value_counts() {
        let args = parse("--steps 1 --pid 3 --steps=2").unwrap().unwrap();
        assert_eq!((args.get("--steps"), args.needed("--pid"), args.get("--seconds")), (Some("2"), Ok("3"), None));
        assert_eq!(args.number("--steps", 7, 1, 9), Ok(2));
        assert_eq!(args.number("--seconds", 7, 1, 9), Ok(7));
    }

    #[test]
    fn mistakes_are_explained() {
        for (words, error) in [
            ("--step 1", "unknown option --step; known: --recording, --protocol, "),
            ("--steps", "--steps needs a value: --steps N"),
            ("now", "unexpected argument \"now\""),
        ] {
            let Err(Failure::Usage(found)) = parse(words) else { panic!("{words} is accepted") };
            assert!(found.starts_with(error), "{found}");
        }
        for text in ["10", "x"] {
            let args = parse(&format!("--steps {text}")).unwrap().unwrap();
            let error = format!("--steps \"{text}\" must be a number from 1 to 9");
            assert_eq!(args.number("--steps", 7, 1, 9), Err(Failure::Usage(error)));
        }
    }

    #[test]
    fn help_is_found_anywhere_and_lists_every_option() {
        assert!(parse("--steps 1 --help --nonsense").unwrap().is_none());
        for option in OPTIONS {
            assert!(help().contains(&format!("\n  {} {} ", option.name, option.value)), "{}", help());
        }
    }
}
