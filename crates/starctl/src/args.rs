//! Command lines: what a command takes, its help text, and what was given.

use std::fmt::Display;
use std::process::ExitCode;
use std::str::FromStr;

pub struct Command {
    pub name: &'static str,
    /// One line for the overview.
    pub about: &'static str,
    /// Behind the name and the options in the usage line; empty if the command takes no arguments.
    pub positional: &'static str,
    pub options: &'static [Opt],
    /// More about it, whole lines.
    pub details: &'static str,
    pub run: fn(&Args) -> Result<ExitCode, Failure>,
}

pub struct Opt {
    /// With the dashes.
    pub name: &'static str,
    /// What stands for the value in the help; empty for a switch.
    pub value: &'static str,
    pub help: &'static str,
}

pub const JSON: Opt = Opt { name: "--json", value: "", help: "print JSON, for programs" };

pub enum Failure {
    /// The command line is wrong.
    Usage(String),
    Failed(String),
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Usage(message) | Self::Failed(message) => f.write_str(message),
        }
    }
}

pub enum Parsed {
    Help,
    Run(Args),
}

#[derive(Debug, Default)]
pub struct Args {
    options: Vec<(&'static str, String)>,
    pub positional: Vec<String>,
}

impl Args {
    pub fn has(&self, name: &str) -> bool {
        self.options.iter().any(|(given, _)| *given == name)
    }

    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.options.iter().filter(move |(given, _)| *given == name).map(|(_, value)| value.as_str())
    }

    /// The last one counts.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.options.iter().rev().find(|(given, _)| *given == name).map(|(_, value)| value.as_str())
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

impl Command {
    pub fn help(&self) -> String {
        let mut text = format!("{}\n\nusage: starctl {} [OPTIONS]", self.about, self.name);
        if !self.positional.is_empty() {
            text += &format!(" {}", self.positional);
        }
        text += "\n\n";
        for option in self.options {
            text += &format!("  {:<28}{}\n", format!("{} {}", option.name, option.value), option.help);
        }
        text += &format!("  {:<28}print this text\n", "--help");
        if !self.details.is_empty() {
            text += &format!("\n{}", self.details);
        }
        text
    }
}

pub fn parse(command: &Command, arguments: &[String]) -> Result<Parsed, String> {
    let mut args = Args::default();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        if argument == "--help" || argument == "-h" {
            return Ok(Parsed::Help);
        }
        if argument == "--" {
            args.positional.extend(rest.cloned());
            break;
        }
        if !argument.starts_with('-') || argument == "-" {
            args.positional.push(argument.clone());
            continue;
        }
        let (name, inline) = match argument.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (argument.as_str(), None),
        };
        let Some(option) = command.options.iter().find(|option| option.name == name) else {
            let known: Vec<&str> = command.options.iter().map(|option| option.name).collect();
            return Err(match known.is_empty() {
                true => format!("unknown option {name}; this command takes none"),
                false => format!("unknown option {name}; known: {}", known.join(", ")),
            });
        };
        let value = match (option.value.is_empty(), inline) {
            (true, None) => String::new(),
            (true, Some(_)) => return Err(format!("{name} takes no value")),
            (false, Some(value)) => value,
            (false, None) => {
                rest.next().cloned().ok_or_else(|| format!("{name} needs a value: {name} {}", option.value))?
            }
        };
        args.options.push((option.name, value));
    }
    if command.positional.is_empty() && !args.positional.is_empty() {
        return Err(format!("unexpected argument {:?}", args.positional[0]));
    }
    Ok(Parsed::Run(args))
}

#[cfg(test)]
mod tests {
    use super::*;

    const COMMAND: Command = Command {
        name: "try",
        about: "Tries.",
        positional: "ADDRESS...",
        options: &[Opt { name: "--port", value: "N", help: "a port" }, Opt { name: "--once", value: "", help: "once" }],
        details: "",
        run: |_| Ok(ExitCode::SUCCESS),
    };

    fn parse_words(words: &str) -> Result<Parsed, String> {
        parse(&COMMAND, &words.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    fn run(words: &str) -> Args {
        match parse_words(words) {
            Ok(Parsed::Run(args)) => args,
            Ok(Parsed::Help) => panic!("help"),
            Err(error) => panic!("{error}"),
        }
    }

    #[test]
    fn options_and_arguments_in_any_order() {
        let args = run("a --port 1 b --once --port=2 -- --c");
        assert_eq!(args.positional, ["a", "b", "--c"]);
        assert!(args.has("--once"));
        assert_eq!(args.get("--port"), Some("2"));
        assert_eq!(args.all("--port").collect::<Vec<_>>(), ["1", "2"]);
    }

    #[test]
    fn mistakes_are_explained() {
        for (words, error) in [
            ("--prot 1", "unknown option --prot; known: --port, --once"),
            ("--port", "--port needs a value: --port N"),
            ("--once=1", "--once takes no value"),
        ] {
            assert_eq!(parse_words(words).err().as_deref(), Some(error));
        }
        let number = |words: &str| match run(words).number("--port", 7, 1, 9) {
            Ok(n) => n.to_string(),
            Err(Failure::Usage(e) | Failure::Failed(e)) => e,
        };
        assert_eq!(number(""), "7");
        assert_eq!(number("--port 9"), "9");
        assert_eq!(number("--port 10"), "--port \"10\" must be a number from 1 to 9");
        assert_eq!(number("--port x"), "--port \"x\" must be a number from 1 to 9");
    }

    #[test]
    fn help_is_found_anywhere_and_lists_every_option() {
        assert!(matches!(parse_words("a --help --nonsense"), Ok(Parsed::Help)));
        let help = COMMAND.help();
        assert!(help.contains("usage: starctl try [OPTIONS] ADDRESS...\n") && help.contains("  --port N "), "{help}");
    }
}
