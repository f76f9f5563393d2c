//! `starctl completions`: lets a shell complete starctl's command lines.

use std::fmt::Write;
use std::process::ExitCode;

use crate::COMMANDS;
use crate::args::{Args, Command, Failure};

pub const COMMAND: Command = Command {
    name: "completions",
    about: "Prints a script that lets bash, zsh or fish complete commands and options.",
    positional: "SHELL",
    options: &[],
    details: "\
  starctl completions bash >/etc/bash_completion.d/starctl
  starctl completions zsh >\"${fpath[1]}/_starctl\"
  starctl completions fish >~/.config/fish/completions/starctl.fish
",
    run,
};

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let script = match args.positional.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["bash"] => bash(),
        ["zsh"] => zsh(),
        ["fish"] => fish(),
        _ => return Err(Failure::Usage("give one shell: bash, zsh or fish".to_owned())),
    };
    print!("{script}");
    Ok(ExitCode::SUCCESS)
}

fn names() -> String {
    COMMANDS.map(|command| command.name).join(" ")
}

fn options(command: &Command) -> String {
    let names: Vec<&str> = command.options.iter().map(|option| option.name).chain(["--help"]).collect();
    names.join(" ")
}

/// Writing to a String cannot fail, here and below.
fn bash() -> String {
    let mut cases = String::new();
    for command in &COMMANDS {
        let _ = writeln!(cases, "    {}) words=\"{}\" ;;", command.name, options(command));
    }
    format!(
        "_starctl() {{
  local words word=${{COMP_WORDS[COMP_CWORD]}}
  case ${{COMP_WORDS[1]}} in
{cases}  esac
  [ \"$COMP_CWORD\" -gt 1 ] || words=\"{} --help --version\"
  COMPREPLY=($(compgen -W \"$words\" -- \"$word\"))
}}
complete -o default -F _starctl starctl
",
        names()
    )
}

/// Quoted for a single-quoted word of zsh's _arguments and _describe.
fn quoted(text: &str) -> String {
    text.replace('\'', "'\\''").replace(':', "\\:").replace('[', "\\[").replace(']', "\\]")
}

fn zsh() -> String {
    let mut commands = String::new();
    let mut cases = String::new();
    for command in &COMMANDS {
        let _ = writeln!(commands, "    '{}:{}'", command.name, quoted(command.about));
        let _ = write!(cases, "    {}) _arguments '--help[print its help]'", command.name);
        for option in command.options {
            let value = if option.value.is_empty() { String::new() } else { format!(":{}:", quoted(option.value)) };
            let _ = write!(cases, " '*{}[{}]{value}'", option.name, quoted(option.help));
        }
        cases += " '*:: :_files' ;;\n";
    }
    format!(
        "#compdef starctl
_starctl() {{
  local -a commands=(
{commands}  )
  if (( CURRENT == 2 )); then
    _describe command commands
    return
  fi
  shift words
  (( CURRENT-- ))
  case $words[1] in
{cases}  esac
}}
_starctl \"$@\"
"
    )
}

fn fish() -> String {
    let quoted = |text: &str| text.replace('\\', "\\\\").replace('\'', "\\'");
    let mut script = format!("set -l commands {}\n", names());
    for command in &COMMANDS {
        let _ = writeln!(
            script,
            "complete -c starctl -n \"not __fish_seen_subcommand_from $commands\" -a {} -d '{}'",
            command.name,
            quoted(command.about)
        );
        for option in command.options {
            let _ = writeln!(
                script,
                "complete -c starctl -n '__fish_seen_subcommand_from {}' -l {} -d '{}'{}",
                command.name,
                option.name.trim_start_matches('-'),
                quoted(option.help),
                if option.value.is_empty() { "" } else { " -r" }
            );
        }
    }
    script
}
