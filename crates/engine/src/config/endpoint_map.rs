//! `.endpoint_map`: the data address for each gRPC address of the ClusterSpec.
//!
//! One line per task, `grpc_host:port=data_host:port`. Blank lines and `#` comments are allowed, IPv6 addresses are in
//! brackets. If the file exists it is obeyed, and every task of the cluster must be in it.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use super::address::{AddressError, HostPort};
use super::env::Env;
use super::error::ConfigError;
use super::protocol::Protocol;
use super::reader::Reader;
use super::variables;

pub const FILE_NAME: &str = ".endpoint_map";
/// A map of a hundred thousand tasks has a few megabytes; a larger file is not a map.
const MAX_FILE: u64 = 64 << 20;

#[derive(Clone, Debug)]
pub struct EndpointMap {
    path: PathBuf,
    by_grpc: HashMap<String, Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    data: HostPort,
    line: usize,
}

/// The entry of one task, and its line.
#[derive(Clone, Debug)]
pub struct MapLine {
    pub data: HostPort,
    path: PathBuf,
    line: usize,
}

impl fmt::Display for MapLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.path.display(), self.line)
    }
}

impl EndpointMap {
    /// Looks in the three places, in this order; the first that is configured or exists is used:
    /// `$TF_SEASTAR_ENDPOINT_MAP_PATH/.endpoint_map`, the file `$STARWIRE_ENDPOINT_MAP`, `./.endpoint_map`.
    pub fn find(env: &dyn Env) -> Result<Option<Self>, ConfigError> {
        Self::find_with(&mut Reader::new(env, Protocol::GrpcPlusPlus), env)
    }

    pub(super) fn find_with(reader: &mut Reader<'_>, env: &dyn Env) -> Result<Option<Self>, ConfigError> {
        let folder = reader.get(&variables::ENDPOINT_MAP_FOLDER)?;
        let file = reader.get(&variables::ENDPOINT_MAP)?;
        let here = || env.current_dir().map_err(ConfigError::CurrentDir);
        if let Some(folder) = folder {
            let name = variables::ENDPOINT_MAP_FOLDER.name;
            return Self::load(&here()?.join(folder).join(FILE_NAME), Some(name)).map(Some);
        }
        if let Some(file) = file {
            return Self::load(&here()?.join(file), Some(variables::ENDPOINT_MAP.name)).map(Some);
        }
        match Self::load(&here()?.join(FILE_NAME), None) {
            Err(ConfigError::EndpointMap(EndpointMapError::Missing { .. })) => Ok(None),
            other => other.map(Some),
        }
    }

    /// Reads one file. `named_by`: the variable that pointed here, for messages.
    pub fn load(path: &Path, named_by: Option<&'static str>) -> Result<Self, ConfigError> {
        let unreadable = |source: io::Error| match source.kind() {
            io::ErrorKind::NotFound => {
                EndpointMapError::Missing { path: path.to_owned(), named_by: named_by.unwrap_or("nothing") }
            }
            _ => EndpointMapError::Unreadable { path: path.to_owned(), source },
        };
        // Opening a pipe would wait for its writer.
        let file = fs::OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(unreadable)?;
        if !file.metadata().map_err(unreadable)?.is_file() {
            return Err(unreadable(io::Error::other("it is not a regular file")).into());
        }
        let mut bytes = Vec::new();
        file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(unreadable)?;
        if bytes.len() as u64 > MAX_FILE {
            let source = io::Error::other(format!("it is larger than {} MiB", MAX_FILE >> 20));
            return Err(EndpointMapError::Unreadable { path: path.to_owned(), source }.into());
        }
        Ok(Self::parse(path, &bytes)?)
    }

    /// Parses the content of `path`.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, EndpointMapError> {
        let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
        let mut by_grpc: HashMap<String, Entry> = HashMap::new();
        let mut by_data: HashMap<HostPort, usize> = HashMap::new();
        for (index, line) in bytes.split(|&b| b == b'\n').enumerate() {
            let number = index + 1;
            let at = |problem| EndpointMapError::Line { path: path.to_owned(), line: number, problem };
            let line = std::str::from_utf8(line).map_err(|_| at(LineProblem::NotUtf8))?;
            let line = line.split_once('#').map_or(line, |(before, _)| before).trim();
            if line.is_empty() {
                continue;
            }
            let (grpc, data) = parse_line(line).map_err(at)?;
            if let Some(first) = by_grpc.get(&grpc) {
                return Err(at(LineProblem::DuplicateGrpc { address: grpc, first: first.line }));
            }
            if let Some(&first) = by_data.get(&data) {
                return Err(at(LineProblem::DuplicateData { address: data, first }));
            }
            by_data.insert(data.clone(), number);
            by_grpc.insert(grpc, Entry { data, line: number });
        }
        Ok(Self { path: path.to_owned(), by_grpc })
    }

    /// The data address of the task that the ClusterSpec knows under `grpc_address`: compared as text, exactly.
    pub fn get(&self, grpc_address: &str) -> Option<&HostPort> {
        self.by_grpc.get(grpc_address).map(|entry| &entry.data)
    }

    /// The same, with the line.
    pub fn line(&self, grpc_address: &str) -> Option<MapLine> {
        let entry = self.by_grpc.get(grpc_address)?;
        Some(MapLine { data: entry.data.clone(), path: self.path.clone(), line: entry.line })
    }

    /// Every task must be in the map.
    pub fn require<'a>(&self, tasks: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<(), EndpointMapError> {
        let missing: Vec<(&str, &str)> = tasks.into_iter().filter(|(_, address)| self.get(address).is_none()).collect();
        let Some(&(task, address)) = missing.first() else { return Ok(()) };
        Err(EndpointMapError::NoSuchTask {
            path: self.path.clone(),
            task: task.to_owned(),
            address: address.to_owned(),
            others: missing.len() - 1,
            hint: self.spelling_hint(address),
        })
    }

    /// The gRPC addresses in the map, in no order.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.by_grpc.keys().map(String::as_str)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn len(&self) -> usize {
        self.by_grpc.len()
    }

    pub fn is_empty(&self) -> bool {
        self.by_grpc.is_empty()
    }

    /// An entry that means almost the same, with its line: `127.0.0.1:2222` for `localhost:2222`, or another case.
    fn spelling_hint(&self, address: &str) -> String {
        let port = address.rsplit_once(':').map(|(_, port)| port);
        let similar = |candidate: &str| {
            candidate.eq_ignore_ascii_case(address)
                || (port == candidate.rsplit_once(':').map(|(_, port)| port)
                    && super::address::is_loopback(host_of(candidate))
                    && super::address::is_loopback(host_of(address)))
        };
        let mut hits: Vec<(usize, &str)> = self
            .by_grpc
            .iter()
            .filter(|(key, _)| similar(key))
            .map(|(key, entry)| (entry.line, key.as_str()))
            .collect();
        hits.sort_unstable();
        match hits.first() {
            Some((line, key)) => format!("; line {line} has {key}, but addresses are compared as text"),
            None => String::new(),
        }
    }
}

fn host_of(address: &str) -> &str {
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    host.trim_start_matches('[').trim_end_matches(']')
}

fn parse_line(line: &str) -> Result<(String, HostPort), LineProblem> {
    let (grpc, data) = line.split_once('=').ok_or_else(|| LineProblem::NoEquals(line.to_owned()))?;
    if data.contains('=') {
        return Err(LineProblem::ManyEquals(line.to_owned()));
    }
    let (grpc, data) = (grpc.trim(), data.trim());
    let side = |side, text: &str, error| LineProblem::Address { side, text: text.to_owned(), error };
    grpc.parse::<HostPort>().map_err(|error| side(Side::Grpc, grpc, error))?;
    let data_address: HostPort = data.parse().map_err(|error| side(Side::Data, data, error))?;
    if data_address.port == 0 {
        return Err(side(Side::Data, data, AddressError::BadPort("0".to_owned())));
    }
    if super::address::is_unspecified(&data_address.host) {
        return Err(LineProblem::Unspecified(data.to_owned()));
    }
    Ok((grpc.to_owned(), data_address))
}

#[derive(Debug, thiserror::Error)]
pub enum EndpointMapError {
    #[error("{} does not exist, but {named_by} points there", path.display())]
    Missing { path: PathBuf, named_by: &'static str },
    #[error("{} cannot be read: {source}", path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("{}:{line}: {problem}", path.display())]
    Line { path: PathBuf, line: usize, problem: LineProblem },
    #[error(
        "{}: no line for {task}, whose ClusterSpec address is {address}{}{hint}",
        path.display(),
        if *others == 0 { String::new() } else { format!(" (and none for {others} other tasks)") }
    )]
    NoSuchTask { path: PathBuf, task: String, address: String, others: usize, hint: String },
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LineProblem {
    #[error("the line is not UTF-8 text")]
    NotUtf8,
    #[error("{0:?} has no '=': a line is grpc_host:port=data_host:port")]
    NoEquals(String),
    #[error("{0:?} has more than one '=': a line is grpc_host:port=data_host:port")]
    ManyEquals(String),
    #[error("{side} {text:?}: {error}")]
    Address { side: Side, text: String, error: AddressError },
    #[error("the data address {0:?} is a wildcard: peers cannot connect to it")]
    Unspecified(String),
    #[error("the gRPC address {address} is already in line {first}")]
    DuplicateGrpc { address: String, first: usize },
    #[error("the data address {address} is already assigned to another task in line {first}")]
    DuplicateData { address: HostPort, first: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    Grpc,
    Data,
}

impl fmt::Display for Side {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Side::Grpc => "the gRPC address",
            Side::Data => "the data address",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::super::testing::TempDir;
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<EndpointMap, String> {
        EndpointMap::parse(Path::new("m"), text.as_bytes()).map_err(|e| e.to_string())
    }

    #[test]
    fn a_map_with_everything_that_is_allowed() {
        let text = "\u{feff}# the cluster\r\n\r\nps0:2222=ps0:3333\r\n  10.0.0.2:2222 = 10.0.0.2:3333  # second\n[::1]:1=[::1]:2\n\t\nhost:0=other.example.org:9";
        let map = parse(text).unwrap();
        assert_eq!(map.len(), 4);
        assert_eq!(map.get("ps0:2222").unwrap().to_string(), "ps0:3333");
        assert_eq!(map.get("10.0.0.2:2222").unwrap().to_string(), "10.0.0.2:3333");
        assert_eq!(map.get("[::1]:1").unwrap().to_string(), "[::1]:2");
        assert!(map.get("PS0:2222").is_none(), "addresses are compared as text");
        let line = map.line("10.0.0.2:2222").unwrap();
        assert_eq!((line.to_string(), line.data.to_string()), ("m:4".into(), "10.0.0.2:3333".into()));
    }

    #[test]
    fn errors_name_file_and_line() {
        for (text, message) in [
            ("a:1=b:2\n\nnonsense", "m:3: \"nonsense\" has no '=': a line is grpc_host:port=data_host:port"),
            ("a:1=b:2=c:3", "m:1: \"a:1=b:2=c:3\" has more than one '=': a line is grpc_host:port=data_host:port"),
            ("a:1=b", "m:1: the data address \"b\": the port is missing (host:port)"),
            ("a=b:1", "m:1: the gRPC address \"a\": the port is missing (host:port)"),
            ("a:1=b:0", "m:1: the data address \"b:0\": \"0\" is not a port (0 to 65535)"),
            ("a:1=b:70000", "m:1: the data address \"b:70000\": \"70000\" is not a port (0 to 65535)"),
            ("a:1=::1:5", "m:1: the data address \"::1:5\": an IPv6 address needs brackets: [::1]:2222"),
            ("a:1=0.0.0.0:5", "m:1: the data address \"0.0.0.0:5\" is a wildcard: peers cannot connect to it"),
            ("a:1=b:2\na:1=b:3", "m:2: the gRPC address a:1 is already in line 1"),
            ("a:1=b:2\n#\nc:1=b:2", "m:3: the data address b:2 is already assigned to another task in line 1"),
            ("=", "m:1: the gRPC address \"\": the host is empty"),
        ] {
            assert_eq!(parse(text).unwrap_err(), message);
        }
        let error = EndpointMap::parse(Path::new("m"), b"a:1=b:2\n\xff").unwrap_err();
        assert_eq!(error.to_string(), "m:2: the line is not UTF-8 text");
    }

    #[test]
    fn every_task_must_be_there() {
        let map = parse("127.0.0.1:2222=127.0.0.1:3333\nWorker:1=w:2").unwrap();
        assert!(map.require([("/job:ps/task:0", "127.0.0.1:2222")]).is_ok());
        let error =
            |tasks: &[(&'static str, &'static str)]| map.require(tasks.iter().copied()).unwrap_err().to_string();
        assert_eq!(
            error(&[("/job:ps/task:0", "localhost:2222"), ("/job:ps/task:1", "x:1")]),
            "m: no line for /job:ps/task:0, whose ClusterSpec address is localhost:2222 (and none for 1 other tasks); \
             line 1 has 127.0.0.1:2222, but addresses are compared as text"
        );
        assert_eq!(
            error(&[("/job:w/task:0", "worker:1")]),
            "m: no line for /job:w/task:0, whose ClusterSpec address is worker:1; line 2 has Worker:1, but addresses are compared as text"
        );
        assert_eq!(
            error(&[("/job:w/task:0", "x:1")]),
            "m: no line for /job:w/task:0, whose ClusterSpec address is x:1"
        );
    }

    #[test]
    fn the_three_places_in_their_order() {
        let dir = TempDir::new("endpoint-map-order");
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let env = MapEnv::new(dir.path());
        assert!(EndpointMap::find(&env).unwrap().is_none());

        write(FILE_NAME, "a:1=here:1");
        write("file", "a:1=file:1");
        write("dir/.endpoint_map", "a:1=dir:1");
        let host = |env: &MapEnv| EndpointMap::find(env).unwrap().unwrap().get("a:1").unwrap().host.clone();
        assert_eq!(host(&env), "here");
        let env = env.set("STARWIRE_ENDPOINT_MAP", "file");
        assert_eq!(host(&env), "file");
        let env = env.set("TF_SEASTAR_ENDPOINT_MAP_PATH", "");
        assert_eq!(host(&env), "file", "empty is DeepRec's default and means unset");
        let env = env.set("TF_SEASTAR_ENDPOINT_MAP_PATH", dir.path().join("dir"));
        assert_eq!(host(&env), "dir");
        let env = env.set("TF_SEASTAR_ENDPOINT_MAP_PATH", "nowhere");
        let error = EndpointMap::find(&env).unwrap_err().to_string();
        assert!(
            error.ends_with("nowhere/.endpoint_map does not exist, but TF_SEASTAR_ENDPOINT_MAP_PATH points there"),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_cannot_be_read_is_not_a_missing_file() {
        let dir = TempDir::new("endpoint-map-unreadable");
        fs::create_dir(dir.path().join(FILE_NAME)).unwrap();
        let error = EndpointMap::find(&MapEnv::new(dir.path())).unwrap_err().to_string();
        assert!(error.contains(".endpoint_map cannot be read: it is not a regular file"), "{error}");
    }

    #[test]
    fn a_pipe_is_not_waited_for() {
        let dir = TempDir::new("endpoint-map-pipe");
        let made = std::process::Command::new("mkfifo").arg(dir.path().join(FILE_NAME)).status().unwrap();
        assert!(made.success());
        let error = EndpointMap::find(&MapEnv::new(dir.path())).unwrap_err().to_string();
        assert!(error.contains(".endpoint_map cannot be read: it is not a regular file"), "{error}");
    }

    proptest! {
        #[test]
        fn no_input_makes_the_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = EndpointMap::parse(Path::new("m"), &bytes);
        }

        #[test]
        fn near_misses_do_not_panic_and_name_a_line(text in "([a-z0-9:=#\\[\\]. \r\n%]{0,60})") {
            if let Err(error) = parse(&text) {
                prop_assert!(error.starts_with("m:"), "{}", error);
            }
        }

        #[test]
        fn what_is_written_is_found(
            ports in proptest::collection::btree_set(1u16..=65535, 1..50),
            crlf in any::<bool>(), comments in any::<bool>(),
        ) {
            let end = if crlf { "\r\n" } else { "\n" };
            let mut text = String::new();
            for port in &ports {
                if comments { text += &format!("# port {port}{end}{end}"); }
                text += &format!("host-{port}:{port}=data-{port}:{port}{end}");
            }
            let map = parse(&text).unwrap();
            prop_assert_eq!(map.len(), ports.len());
            for port in ports {
                let found = map.get(&format!("host-{port}:{port}")).unwrap();
                prop_assert_eq!(found, &HostPort { host: format!("data-{port}"), port });
            }
        }
    }
}
