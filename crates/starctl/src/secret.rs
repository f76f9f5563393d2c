//! `starctl secret`: makes a secret for a cluster.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::ExitCode;

use crate::args::{Args, Command, Failure, Opt};

const FILE: &str = "--file";

pub const COMMAND: Command = Command {
    name: "secret",
    about: "Generates a secret for a cluster.",
    positional: "",
    options: &[Opt { name: FILE, value: "FILE", help: "write it to a new file that only this user may read" }],
    details: "\
256 random bits as 64 hexadecimal digits, for STARWIRE_SECRET or the file that STARWIRE_SECRET_FILE names. All tasks of a
cluster need the same.
",
    run,
};

fn run(args: &Args) -> Result<ExitCode, Failure> {
    let secret = generate().map_err(|error| Failure::Failed(format!("no random numbers: {error}")))?;
    match args.get(FILE) {
        None => println!("{secret}"),
        Some(path) => {
            let new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            let written = new.and_then(|mut file| writeln!(file, "{secret}"));
            written.map_err(|error| Failure::Failed(format!("cannot write {path}: {error}")))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn generate() -> std::io::Result<String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_are_long_and_differ() {
        let (one, other) = (generate().unwrap(), generate().unwrap());
        assert_eq!((one.len(), other.len()), (64, 64));
        assert_ne!(one, other);
    }
}
