//! The shared secret of a cluster.

use std::fs::OpenOptions;
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::time::{Duration, Instant};

use super::error::ConfigError;
use super::reader::Reader;
use super::variables;
use starwire_protocol::Secret;

/// Shorter secrets can be guessed from one recorded handshake.
const MIN_LEN: usize = 16;
const MAX_LEN: usize = 4096;
/// How long a pipe may be empty.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn read(reader: &mut Reader<'_>, warnings: &mut Vec<String>) -> Result<Option<Secret>, ConfigError> {
    let value_name = variables::SECRET.name;
    let file_name = variables::SECRET_FILE.name;
    let value = reader.get(&variables::SECRET)?;
    let file = reader.get(&variables::SECRET_FILE)?;
    match (value, file) {
        (None, None) => Ok(None),
        (Some(_), Some(_)) => Err(ConfigError::Conflict {
            first: value_name,
            second: file_name,
            reason: "both are set; unset one".to_owned(),
        }),
        (Some(value), None) => check(value_name, value.as_bytes()).map(Some),
        (None, Some(path)) => {
            let unreadable = |source| ConfigError::File { name: file_name, path: path.clone().into(), source };
            let mut bytes = contents(&path, PATIENCE).map_err(unreadable)?;
            if bytes.ends_with(b"\n") {
                bytes.pop();
                if bytes.ends_with(b"\r") {
                    bytes.pop();
                }
            }
            warn_if_open(&path, warnings);
            check(file_name, &bytes).map(Some)
        }
    }
}

/// Reads a file or a pipe, and no more than a secret can have, with room for the end of a line.
fn contents(path: &str, patience: Duration) -> io::Result<Vec<u8>> {
    let mut file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    let is_pipe = file.metadata()?.file_type().is_fifo();
    let (begin, mut bytes, mut chunk) = (Instant::now(), Vec::new(), [0; MAX_LEN]);
    while bytes.len() < MAX_LEN + 3 {
        match file.read(&mut chunk) {
            // The end, or nobody has opened the pipe yet to write into it.
            Ok(0) if !(is_pipe && bytes.is_empty()) => break,
            Ok(n) if n > 0 => bytes.extend_from_slice(&chunk[..n]),
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => return Err(error),
            _ if begin.elapsed() < patience => std::thread::sleep(Duration::from_millis(10)),
            _ => return Err(io::Error::new(io::ErrorKind::TimedOut, "nobody has written into this pipe")),
        }
    }
    Ok(bytes)
}

fn check(name: &'static str, bytes: &[u8]) -> Result<Secret, ConfigError> {
    if !(MIN_LEN..=MAX_LEN).contains(&bytes.len()) {
        let reason = format!("it has {} bytes, {MIN_LEN} to {MAX_LEN} are required", bytes.len());
        return Err(ConfigError::Secret { name, reason });
    }
    Ok(Secret::new(bytes))
}

fn warn_if_open(path: &str, warnings: &mut Vec<String>) {
    use std::os::unix::fs::PermissionsExt;
    let Ok(metadata) = std::fs::metadata(path) else { return };
    if metadata.permissions().mode() & 0o004 != 0 {
        warnings.push(format!("STARWIRE_SECRET_FILE: every user of this machine can read {path} (chmod o-r)"));
    }
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::super::protocol::Protocol;
    use super::super::testing::TempDir;
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    const GOOD: &str = "0123456789abcdef";

    fn read(env: &MapEnv) -> (Result<Option<Secret>, String>, Vec<String>) {
        let mut warnings = Vec::new();
        let secret = super::read(&mut Reader::new(env, Protocol::GrpcPlusPlus), &mut warnings);
        (secret.map_err(|e| e.to_string()), warnings)
    }

    #[test]
    fn from_the_variable() {
        assert_eq!(read(&MapEnv::new("/")).0, Ok(None));
        let env = MapEnv::new("/").set("STARWIRE_SECRET", GOOD);
        assert_eq!(read(&env).0.unwrap().unwrap(), Secret::new(GOOD.as_bytes()));
    }

    #[test]
    fn from_a_file_without_its_newline() {
        let dir = TempDir::new("secret");
        let path = dir.path().join("s");
        let env = MapEnv::new("/").set("STARWIRE_SECRET_FILE", &path);
        let (missing, _) = read(&env);
        assert!(missing.unwrap_err().starts_with("STARWIRE_SECRET_FILE names "));
        for end in ["", "\n", "\r\n"] {
            std::fs::write(&path, format!("{GOOD}{end}")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
            let (secret, warnings) = read(&env);
            assert_eq!(secret.unwrap().unwrap(), Secret::new(GOOD.as_bytes()));
            assert!(warnings.is_empty());
        }
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(read(&env).1.len(), 1);
    }

    #[test]
    fn a_file_without_an_end_is_too_long() {
        let (secret, _) = read(&MapEnv::new("/").set("STARWIRE_SECRET_FILE", "/dev/zero"));
        assert!(secret.unwrap_err().contains("bytes, 16 to 4096 are required"));
    }

    #[test]
    fn pipes() {
        let dir = TempDir::new("secret-pipe");
        let path = dir.path().join("pipe");
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        let path = path.to_str().unwrap();
        let error = contents(path, Duration::ZERO).unwrap_err();
        assert_eq!(error.to_string(), "nobody has written into this pipe");
        let writer = std::thread::spawn({
            let path = path.to_owned();
            move || std::fs::write(path, GOOD).unwrap()
        });
        assert_eq!(contents(path, Duration::from_secs(60)).unwrap(), GOOD.as_bytes());
        writer.join().unwrap();
    }

    #[test]
    fn errors_never_show_the_value() {
        let short = MapEnv::new("/").set("STARWIRE_SECRET", "hunter2");
        assert_eq!(read(&short).0.unwrap_err(), "STARWIRE_SECRET is unusable: it has 7 bytes, 16 to 4096 are required");
        let empty = MapEnv::new("/").set("STARWIRE_SECRET", "");
        assert_eq!(
            read(&empty).0.unwrap_err(),
            "STARWIRE_SECRET is unusable: it is set, but empty: unset it to run without a secret, or use STARWIRE_SECRET_FILE if this process was started by a server, which has emptied it"
        );
        let both = MapEnv::new("/").set("STARWIRE_SECRET", GOOD).set("STARWIRE_SECRET_FILE", "/x");
        assert_eq!(
            read(&both).0.unwrap_err(),
            "STARWIRE_SECRET and STARWIRE_SECRET_FILE conflict: both are set; unset one"
        );
    }
}
