//! `starctl secret`: makes a secret for a cluster.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::ExitCode;

use crate::failure::Failure;
use crate::output::say;

/// Generate a secret for a cluster
#[derive(clap::Args)]
#[command(after_help = "\
256 random bits as 64 hexadecimal digits, for STARWIRE_SECRET or the file that STARWIRE_SECRET_FILE
names. All tasks of a cluster need the same.")]
pub struct Args {
    /// Write it to a new file that only this user may read
    #[arg(long)]
    file: Option<PathBuf>,
}

pub fn run(args: &Args) -> Result<ExitCode, Failure> {
    let secret = generate().map_err(|error| Failure::Failed(format!("no random numbers: {error}")))?;
    match &args.file {
        None => say(secret)?,
        Some(path) => {
            let new = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            let written = new.and_then(|mut file| writeln!(file, "{secret}"));
            written.map_err(|error| Failure::Failed(format!("cannot write {}: {error}", path.display())))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn generate() -> std::io::Result<String> {
    let mut bytes = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}
