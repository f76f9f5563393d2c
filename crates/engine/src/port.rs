//! The one port of a task (`STARWIRE_PORTS=one`), bound before TensorFlow's gRPC server is made, and the socket that
//! this server listens on instead.
//!
//! TensorFlow's server gets a unix socket in a directory that only this user may enter. As soon as it listens, both
//! names are removed: from then on the socket can be reached through a descriptor of this process and in no other way.

use std::fs::{DirBuilder, OpenOptions};
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use crate::config::{Config, Env, Identity, Ports};
use crate::error::EngineError;
use crate::system::random;
use starwire_net::transport::{SocketAddress, tcp};

/// The longest path of a unix socket that every version of gRPC accepts.
const MAX_PATH: usize = 100;

/// A bound port that an engine will serve. Connections wait until then.
pub struct Port {
    pub(crate) listener: OwnedFd,
    pub(crate) bound: SocketAddr,
    pub(crate) grpc: Named,
}

impl Port {
    /// Binds the port of the server's ClusterSpec entry, or `requested` if that is not 0. None: the server has two
    /// ports.
    pub fn bind(env: &dyn Env, identity: Identity, requested: u16) -> Result<Option<Self>, EngineError> {
        let mut config = Config::from_env(env, identity)?;
        if config.ports == Ports::Two {
            return Ok(None);
        }
        for address in config.bind.iter_mut().filter(|_| requested != 0) {
            address.set_port(requested);
        }
        let (listener, bound) = listen(&config).map_err(|error| match error {
            EngineError::Transport(source) => EngineError::OnePort(source),
            other => other,
        })?;
        Ok(Some(Self { listener, bound, grpc: Named::new(env)? }))
    }

    pub fn number(&self) -> u16 {
        self.bound.port()
    }

    /// The address, as gRPC writes it, that TensorFlow's server has to listen on before the engine starts.
    pub fn grpc_address(&self) -> String {
        format!("unix:{}", self.grpc.path().display())
    }
}

/// Binds the first address that is free.
pub fn listen(config: &Config) -> Result<(OwnedFd, SocketAddr), EngineError> {
    let mut failure = None;
    for address in &config.bind {
        let made = if address.is_ipv6() && address.ip().is_unspecified() {
            tcp::listen_everywhere(address.port())
        } else {
            tcp::listen(*address)
        };
        match made {
            Ok(fd) => match tcp::local_address(fd.as_fd())? {
                Some(SocketAddress::Inet(bound)) => return Ok((fd, bound)),
                _ => failure = None,
            },
            Err(error) => failure = Some(error),
        }
    }
    Err(failure.map_or(EngineError::NoAddress, EngineError::Transport))
}

/// A private directory with room for one socket. Removed when it is dropped.
pub(crate) struct Named {
    folder: PathBuf,
}

impl Named {
    pub fn new(env: &dyn Env) -> Result<Self, EngineError> {
        let own = env.var("TMPDIR").filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let usual = ["/tmp", "/dev/shm", "/var/tmp"].map(PathBuf::from);
        let mut failures = Vec::new();
        for parent in own.into_iter().chain(usual) {
            match Self::inside(&parent) {
                Ok(made) => return Ok(made),
                Err(error) => failures.push(format!("{}: {error}", parent.display())),
            }
        }
        Err(EngineError::NoPrivateSocket(failures.join("; ")))
    }

    fn inside(parent: &Path) -> io::Result<Self> {
        let [a, b, c, d, e, f, g, h, ..] = random::bytes();
        let number = u64::from_ne_bytes([a, b, c, d, e, f, g, h]);
        let folder = parent.join(format!("starwire-{number:016x}"));
        // Fails if the directory exists, whoever made it.
        DirBuilder::new().mode(0o700).create(&folder)?;
        let made = Self { folder };
        if made.path().as_os_str().len() > MAX_PATH || !made.path().is_absolute() {
            return Err(io::Error::other("the path of a socket there would be too long, or is relative"));
        }
        // Not every file system has sockets; gRPC would not tell why it fails.
        drop(UnixListener::bind(made.path())?);
        std::fs::remove_file(made.path())?;
        Ok(made)
    }

    pub fn path(&self) -> PathBuf {
        self.folder.join("grpc")
    }

    /// Removes the names of the socket, which now listens.
    pub fn hide(self) -> Result<Hidden, EngineError> {
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_PATH | libc::O_CLOEXEC).open(self.path());
        Ok(Hidden { socket: opened.map_err(EngineError::GrpcSocket)?.into() })
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        // Whoever removed them before has done no harm.
        let _ = std::fs::remove_file(self.path());
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// The socket of TensorFlow's server, without a name.
pub struct Hidden {
    socket: OwnedFd,
}

impl Hidden {
    /// A path that leads to it in this process.
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.socket.as_raw_fd()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::MapEnv;
    use crate::config::testing::TempDir;
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::UnixStream;

    #[test]
    fn only_a_descriptor_leads_to_a_hidden_socket() {
        let parent = TempDir::new("port");
        let env = MapEnv::new("/").set("TMPDIR", parent.path());
        let named = Named::new(&env).unwrap();
        let (folder, path) = (named.folder.clone(), named.path());
        assert_eq!(folder.parent(), Some(parent.path()));
        assert_eq!(folder.metadata().unwrap().permissions().mode() & 0o777, 0o700);
        let listener = UnixListener::bind(&path).unwrap();
        let hidden = named.hide().unwrap();
        assert!(!folder.exists());
        assert_eq!(UnixStream::connect(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let _client = UnixStream::connect(hidden.path()).unwrap();
        listener.accept().unwrap();
    }

    #[test]
    fn a_directory_that_does_not_do_is_passed_over() {
        let parent = TempDir::new("port");
        let missing = parent.path().join("missing");
        for unfit in [missing, PathBuf::from("relative"), PathBuf::from(format!("/tmp/{}", "x".repeat(120)))] {
            let named = Named::new(&MapEnv::new("/").set("TMPDIR", &unfit)).unwrap();
            assert_eq!(named.folder.parent(), Some(Path::new("/tmp")), "{}", unfit.display());
        }
    }

    #[test]
    fn a_server_that_does_not_listen_is_an_error() {
        let named = Named::new(&MapEnv::new("/")).unwrap();
        let folder = named.folder.clone();
        let error = named.hide().map(drop).unwrap_err().to_string();
        assert!(error.contains("TensorFlow's gRPC server"), "{error}");
        assert!(!folder.exists());
    }
}
