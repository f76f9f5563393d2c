//! The list of environment variables, from which the documentation's table is generated, and the reader that parses
//! their values.

use std::ops::RangeInclusive;

use super::env::Env;
use super::error::ConfigError;

/// One environment variable.
pub struct Variable {
    pub name: &'static str,
    /// As shown in the documentation.
    pub default: &'static str,
    pub meaning: &'static str,
    /// The value is secret.
    pub secret: bool,
}

const fn variable(name: &'static str, default: &'static str, meaning: &'static str) -> Variable {
    Variable { name, default, meaning, secret: false }
}

/// Every variable that starwire reads.
pub const VARIABLES: &[Variable] = &[
    variable(
        "WORKER_ENABLE_POLLING",
        "false",
        "Reactors of jobs `worker` and `chief` poll instead of sleeping. Costs a core each; backs off when threads outnumber cores.",
    ),
    variable("PS_ENABLE_POLLING", "false", "The same for every other job."),
    variable(
        "NETWORK_WORKER_CORE_NUMBER",
        "16 (star protocols: 2)",
        "Most reactor threads in jobs `worker` and `chief`. There are never more than tasks in the cluster, nor more than CPUs that the process may use.",
    ),
    variable(
        "NETWORK_PS_CORE_NUMBER",
        "16 (star protocols: 8)",
        "The same for job `ps` and the jobs of `STARWIRE_PS_JOBS`. Other jobs have 16.",
    ),
    variable(
        "WORKER_DISABLE_PIN_CORES",
        "true",
        "`false` pins each reactor of jobs `worker` and `chief` to a CPU of its own, out of those that the process may use.",
    ),
    variable("PS_DISABLE_PIN_CORES", "true", "The same for every other job."),
    variable(
        "NETWORK_MAX_CONNECTION_TIMEOUT",
        "120000",
        "Milliseconds (1 to 86400000) that one attempt to connect to a peer may take; more than 10000 counts as 10000. A request ends with `Unavailable` when the attempt that it waits for fails; the creation of a session tries again for as long as it takes, as over `grpc`, and the log says for whom it waits.",
    ),
    variable(
        "TF_SEASTAR_ENDPOINT_MAP_PATH",
        "",
        "Directory of `.endpoint_map`. If set, the file must exist. Empty is the same as unset.",
    ),
    variable(
        "STARWIRE_ENDPOINT_MAP",
        "",
        "The endpoint map as a file of any name, if `TF_SEASTAR_ENDPOINT_MAP_PATH` is unset. If set, the file must exist. With neither, `./.endpoint_map` is used if it exists.",
    ),
    variable(
        "STARWIRE_BIND",
        "from the own ClusterSpec entry",
        "IP address to listen on for data, with or without a port: `0.0.0.0`, `[::]:7000`. Without a port: the one of the endpoint map, else one that the system chooses.",
    ),
    variable(
        "STARWIRE_ADVERTISE",
        "host of the own ClusterSpec entry",
        "Host (or `host:port`) that peers are told to connect to, for servers behind address translation.",
    ),
    variable(
        "STARWIRE_REACTORS",
        "see NETWORK_*_CORE_NUMBER",
        "Exact number of reactor threads (1 to 256) in every job, whatever the size of the cluster and of the machine.",
    ),
    variable(
        "STARWIRE_DRIVER",
        "auto",
        "How reactors talk to the kernel: `auto` (epoll), `epoll` or `io_uring`, which fails at start where the kernel lacks it or a container forbids it, and uses less CPU for large tensors over TCP.",
    ),
    variable(
        "STARWIRE_KEEPALIVE_MS",
        "5000",
        "Milliseconds (10 to 3600000) of silence after which a peer is asked whether it lives.",
    ),
    variable(
        "STARWIRE_KEEPALIVE_TIMEOUT_MS",
        "15000",
        "Milliseconds (10 to 3600000) of silence after that question until the connection counts as lost and its requests end with `Unavailable`.",
    ),
    Variable {
        name: "STARWIRE_SECRET",
        default: "",
        meaning: "At least 16 bytes that every task of the cluster knows; both sides of a connection prove it (HMAC-SHA256) without sending it.",
        secret: true,
    },
    variable("STARWIRE_SECRET_FILE", "", "A file with the secret instead (one trailing newline is not part of it)."),
    variable(
        "STARWIRE_CLUSTER_ID",
        "",
        "Name of the cluster, up to 128 printable characters without spaces. Peers with another one are refused, so that two jobs cannot mix.",
    ),
    variable("STARWIRE_UNIX", "auto", "`auto`: tasks of one host talk over a unix socket. `off`: always TCP."),
    variable(
        "STARWIRE_LOANS",
        "auto",
        "`auto`: what tasks of one host send each other over a unix socket and is large is copied straight from one process's memory to the other's, where the kernel allows it ([architecture.md](architecture.md#between-tasks-of-one-host)). `off`: through the socket.",
    ),
    variable(
        "STARWIRE_TRANSPORT",
        "verbs for `grpc+verbs`, else tcp",
        "What carries data between hosts: `tcp`, or `verbs` (RDMA, see [verbs.md](verbs.md)), for any protocol. All tasks need the same.",
    ),
    variable(
        "STARWIRE_VERBS_FALLBACK",
        "true",
        "`true`: where RDMA does not work, TCP is used and the log says why. `false`: a server without RDMA does not start, peers without it are refused.",
    ),
    variable("STARWIRE_VERBS_LIBRARY", "libibverbs.so.1", "Name or path of libibverbs."),
    variable(
        "STARWIRE_VERBS_DIRECT_MIN",
        "64K",
        "Pieces of tensors of at least this many bytes (4K to 1G) are read by the peer's device from where they lie; shorter ones are copied into messages.",
    ),
    variable(
        "STARWIRE_VERBS_BUFFERS",
        "512K",
        "Bytes of message buffers (128K to 64M) for each direction of an RDMA connection; locked memory.",
    ),
    variable(
        "STARWIRE_VERBS_ARENA",
        "the machine's memory",
        "Bytes that tensors of at least `STARWIRE_VERBS_DIRECT_MIN` may take in memory whose registrations are kept; further ones are registered for each transfer. 0: all.",
    ),
    variable("RDMA_DEVICE", "the first with an active port", "Name of the RDMA device, as `ibv_devices` lists it."),
    variable("RDMA_DEVICE_PORT", "the first active one", "Port of the device, from 1."),
    variable(
        "RDMA_GID_INDEX",
        "found",
        "Row of the port's GID table. Without it: on Ethernet the first RoCE v2 address, IPv4 before IPv6; on InfiniBand row 0.",
    ),
    variable("RDMA_QP_PKEY_INDEX", "0", "Row of the port's partition key table."),
    variable(
        "RDMA_QP_QUEUE_DEPTH",
        "1024",
        "Work requests (64 to 32768) that a queue pair holds; less if the device has less.",
    ),
    variable(
        "RDMA_QP_TIMEOUT",
        "14",
        "A packet without an answer is sent again after 4.096 µs · 2^n (1 to 31; 14 is 67 ms).",
    ),
    variable("RDMA_QP_RETRY_COUNT", "7", "How often (0 to 7), before the connection counts as lost."),
    variable("RDMA_QP_SL", "0", "Service level (0 to 15): on RoCE the priority."),
    variable(
        "RDMA_QP_MTU",
        "port",
        "Bytes of payload per packet: 256, 512, 1024, 2048, 4096, or `port` for what the port has. The smaller one of both sides is used.",
    ),
    variable(
        "RDMA_TRAFFIC_CLASS",
        "0",
        "Traffic class (0 to 255) of the GRH: on RoCE v2 the IP header's DSCP and ECN bits.",
    ),
    variable(
        "STARWIRE_PS_JOBS",
        "ps",
        "Jobs that are parameter servers, separated by commas. Without it the star protocols find them out ([star_server.md](star_server.md)).",
    ),
    variable(
        "STARWIRE_MAX_INFLIGHT",
        "65536",
        "Unanswered requests (16 to 16777216) that one connection may have; more wait at the sender.",
    ),
    variable(
        "STARWIRE_MAX_CALL_BYTES",
        "16G",
        "Largest payload of one incoming call (1M to 1T; suffixes K, M, G, T); larger ones are refused with `ResourceExhausted` before memory is taken.",
    ),
    variable("STARWIRE_METRICS", "on", "`off`: no `/metrics` and no numbers in the statistics."),
    variable(
        "STARWIRE_CONTROL",
        "on",
        "Who may use the control service (health, statistics, `/metrics`) on the data port: `on` everybody, `loopback` only this host, `off` nobody.",
    ),
    variable(
        "STARWIRE_TENSOR_FUSE",
        "false",
        "Tensors that cross together travel as one, in sessions whose configuration does not say otherwise ([tensor_fuse.md](tensor_fuse.md)). Over `grpc` as well, if every process has loaded the library. Counts in the process that a session connects to, as do the next eight.",
    ),
    variable(
        "STARWIRE_TENSOR_FUSE_SMALL_BYTES",
        "16K",
        "Tensors up to this size (0 to 1G) are grouped with each other …",
    ),
    variable(
        "STARWIRE_TENSOR_FUSE_LARGE_BYTES",
        "256K",
        "… and so are those above, up to this size (0 to 1G). Larger ones travel alone.",
    ),
    variable("STARWIRE_TENSOR_FUSE_GROUP_BYTES", "1M", "The most that one group carries (0 to 1G)."),
    variable("STARWIRE_TENSOR_FUSE_GROUP_ITEMS", "1024", "The most tensors in one group (2 to 16384)."),
    variable(
        "STARWIRE_TENSOR_FUSE_WAIT_US",
        "500",
        "The longest that a tensor waits for others of its group (0 to 60000000 microseconds, as estimated when the graph is planned).",
    ),
    variable(
        "STARWIRE_TENSOR_FUSE_MESSAGE_US",
        "100",
        "What a message costs (1 to 1000000 microseconds): all the waiting of a group is not more than this for each message that it saves.",
    ),
    variable("STARWIRE_TENSOR_FUSE_CONTROL", "true", "`false` leaves control dependencies between tasks alone."),
    variable("STARWIRE_TENSOR_FUSE_LOOPS", "true", "`false` leaves everything within loops alone."),
    variable(
        "STARWIRE_STAR_MAX_PLANS",
        "4096",
        "Most plans (1 to 16777216) that one worker may have on a parameter server ([star_server.md](star_server.md)).",
    ),
    variable("STARWIRE_STAR_MAX_PLAN_BYTES", "1G", "Most bytes of plans (1M to 1T), as they were registered."),
    variable(
        "STARWIRE_STAR_PLAN_IDLE_S",
        "3600",
        "A plan that nobody used for so many seconds (1 to 31536000) is dropped; whoever still needs it registers it again.",
    ),
    variable(
        "STARWIRE_STAR_SESSION_IDLE_S",
        "86400",
        "A session whose plans nobody used for so many seconds (1 to 31536000) is taken for gone, with the state that its kernels carry.",
    ),
    variable(
        "STARWIRE_STAR_MAX_SLOTS",
        "65536",
        "Most values (0 to 16777216) that one worker may keep on a parameter server between the calls of its steps.",
    ),
    variable("STARWIRE_STAR_MAX_SLOT_BYTES", "4G", "Most bytes (0 to 1T) of these values."),
    variable(
        "STARWIRE_STAR_STEP_IDLE_S",
        "600",
        "What a step keeps is dropped if no call of it comes for so many seconds (1 to 31536000).",
    ),
    variable(
        "STARWIRE_STAR_MAX_CALLS",
        "1024",
        "Most star calls of one worker that may be under way on a parameter server (1 to 16777216).",
    ),
    variable(
        "STARWIRE_STAR_MAX_TOTAL_BYTES",
        "half of the memory",
        "Most bytes (1M to 1024T) of values that all workers together may keep on a parameter server, and likewise of their plans. One worker can keep no more than is left, so that another always finds room; of plans, the one that has most gives way.",
    ),
    variable(
        "STARWIRE_STAR_INLINE_US",
        "250",
        "Plans whose kernels take at most so many microseconds (0 to 1000000) run on the reactor that the call came in on, the others on TensorFlow's pool.",
    ),
    variable(
        "STARWIRE_STAR_SPLIT_BYTES",
        "1M",
        "A star call that would carry at least twice as many bytes (0 to 1T) is made in parts of about so many, where tensors' sizes are known and the parts have nothing to do with each other ([star_server.md](star_server.md)). 0: never. Counts in the process that a session connects to.",
    ),
    variable(
        "STARWIRE_EXECUTOR",
        "auto",
        "Which partitions of graphs run on starwire's own executor instead of TensorFlow's ([executor.md](executor.md)): `auto` those of parameter servers (job `ps` or `STARWIRE_PS_JOBS`), `on` this server's, `off` none.",
    ),
    variable(
        "STARWIRE_LIBRARY",
        "found by version",
        "Path of the shared library that `import starwire` loads. Read by the Python package only.",
    ),
];

/// Prefixes of variables that belong to the build, the tests and the benchmarks.
const FOREIGN_PREFIXES: [&str; 3] = ["STARWIRE_TEST_", "STARWIRE_BENCH_", "STARWIRE_TF_"];

/// The table of `docs/configuration.md`.
pub fn markdown_table() -> String {
    let mut out = String::from("| variable | default | meaning |\n|---|---|---|\n");
    for v in VARIABLES {
        let default = if v.default.is_empty() { "–".to_owned() } else { v.default.to_owned() };
        out += &format!("| `{}` | {} | {} |\n", v.name, default, v.meaning);
    }
    out
}

/// One warning for each unknown `STARWIRE_*` variable: a misspelt name would otherwise have no effect, silently.
pub fn unknown_variables(env: &dyn Env) -> Vec<String> {
    let mut unknown: Vec<String> = env.names().into_iter().filter(|name| is_unknown(name)).collect();
    unknown.sort_unstable();
    unknown
        .into_iter()
        .map(|name| match nearest(&name) {
            Some(known) => format!("{name} is set but is not a variable of starwire; did you mean {known}?"),
            None => format!("{name} is set but is not a variable of starwire"),
        })
        .collect()
}

fn is_unknown(name: &str) -> bool {
    name.starts_with("STARWIRE_")
        && !FOREIGN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
        && !VARIABLES.iter().any(|v| v.name == name)
}

fn nearest(name: &str) -> Option<&'static str> {
    let (distance, known) = VARIABLES.iter().map(|v| (edit_distance(name, v.name), v.name)).min()?;
    (distance <= 4).then_some(known)
}

fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, ca) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &cb) in b.iter().enumerate() {
            let replace = diagonal + usize::from(ca != cb);
            diagonal = row[j + 1];
            row[j + 1] = replace.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The effective value of a variable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub name: &'static str,
    pub value: String,
    pub is_default: bool,
}

/// Reads variables and records their effective values.
pub(super) struct Reader<'a> {
    env: &'a dyn Env,
    pub settings: Vec<Setting>,
}

/// The type of a number that a variable sets.
pub trait Number: TryFrom<u64> + PartialOrd + Copy + std::fmt::Display {}

impl<T: TryFrom<u64> + PartialOrd + Copy + std::fmt::Display> Number for T {}

impl<'a> Reader<'a> {
    pub fn new(env: &'a dyn Env) -> Self {
        Self { env, settings: Vec::new() }
    }

    /// `true`, `false`, `1` or `0` in any case, like TensorFlow's own switches.
    pub fn boolean(&mut self, name: &'static str, default: bool) -> Result<bool, ConfigError> {
        self.parse(name, default, "true, false, 1 or 0", |text| match text.to_ascii_lowercase().as_str() {
            "true" | "1" => Some(true),
            "false" | "0" => Some(false),
            _ => None,
        })
    }

    pub fn number<T: Number>(
        &mut self,
        name: &'static str,
        default: T,
        range: RangeInclusive<T>,
    ) -> Result<T, ConfigError> {
        let allowed = format!("a whole number from {} to {}", range.start(), range.end());
        self.parse(name, default, &allowed, |text| {
            digits(text).and_then(|n| T::try_from(n).ok()).filter(|n| range.contains(n))
        })
    }

    pub fn optional_number<T: Number>(
        &mut self,
        name: &'static str,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, ConfigError> {
        if self.raw(name)?.is_none() {
            self.record(name, String::new(), true);
            return Ok(None);
        }
        self.number(name, *range.start(), range).map(Some)
    }

    /// A number of bytes with an optional binary suffix.
    pub fn bytes(&mut self, name: &'static str, default: u64, range: RangeInclusive<u64>) -> Result<u64, ConfigError> {
        let allowed = format!("a number of bytes from {} to {} (suffixes K, M, G, T)", range.start(), range.end());
        self.parse(name, default, &allowed, |text| parse_bytes(text).filter(|n| range.contains(n)))
    }

    pub fn choice<T: Copy>(
        &mut self,
        name: &'static str,
        choices: &[(&'static str, T)],
        default: &'static str,
    ) -> Result<T, ConfigError> {
        let names: Vec<&str> = choices.iter().map(|(name, _)| *name).collect();
        let allowed = format!("one of {}", names.join(", "));
        let text = self.raw(name)?;
        let wanted = text.as_deref().unwrap_or(default);
        let Some((spelling, value)) = choices.iter().find(|(choice, _)| choice.eq_ignore_ascii_case(wanted)) else {
            return Err(ConfigError::Value { name, value: wanted.to_owned(), allowed });
        };
        self.record(name, (*spelling).to_owned(), text.is_none());
        Ok(*value)
    }

    /// Free text; empty is the same as unset.
    pub fn text(&mut self, name: &'static str) -> Result<Option<String>, ConfigError> {
        let text = self.raw(name)?.filter(|text| !text.is_empty());
        self.record(name, text.clone().unwrap_or_default(), text.is_none());
        Ok(text)
    }

    /// Secret text. Set but empty is an error: a secret was intended.
    pub fn secret_text(&mut self, name: &'static str) -> Result<Option<String>, ConfigError> {
        let text = match self.env.var(name) {
            None => None,
            Some(value) => Some(
                value
                    .into_string()
                    .map_err(|_| ConfigError::Secret { name, reason: "it is not UTF-8 text".to_owned() })?,
            ),
        };
        if text.as_ref().is_some_and(String::is_empty) {
            return Err(ConfigError::Secret {
                name,
                reason: "it is set, but empty; unset it to run without a secret".to_owned(),
            });
        }
        self.record(name, if text.is_some() { "set" } else { "" }.to_owned(), text.is_none());
        Ok(text)
    }

    fn parse<T: ToString>(
        &mut self,
        name: &'static str,
        default: T,
        allowed: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Result<T, ConfigError> {
        let Some(text) = self.raw(name)? else {
            self.record(name, default.to_string(), true);
            return Ok(default);
        };
        match parse(text.trim()) {
            Some(value) => {
                self.record(name, value.to_string(), false);
                Ok(value)
            }
            None => Err(ConfigError::Value { name, value: text, allowed: allowed.to_owned() }),
        }
    }

    fn raw(&self, name: &'static str) -> Result<Option<String>, ConfigError> {
        debug_assert!(VARIABLES.iter().any(|v| v.name == name), "{name} is read but not in the table");
        match self.env.var(name).map(std::ffi::OsString::into_string) {
            None => Ok(None),
            Some(Ok(text)) => Ok(Some(text)),
            Some(Err(raw)) => Err(ConfigError::Value {
                name,
                value: raw.to_string_lossy().into_owned(),
                allowed: "UTF-8 text".to_owned(),
            }),
        }
    }

    fn record(&mut self, name: &'static str, value: String, is_default: bool) {
        self.settings.retain(|s| s.name != name);
        self.settings.push(Setting { name, value, is_default });
    }
}

fn digits(text: &str) -> Option<u64> {
    // u64's parser would also take "+5".
    if text.bytes().all(|b| b.is_ascii_digit()) { text.parse().ok() } else { None }
}

fn parse_bytes(text: &str) -> Option<u64> {
    let shift = match text.bytes().last()?.to_ascii_uppercase() {
        b'K' => 10,
        b'M' => 20,
        b'G' => 30,
        b'T' => 40,
        _ => return digits(text),
    };
    digits(&text[..text.len() - 1])?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::super::env::MapEnv;
    use super::*;

    fn env(value: &str) -> MapEnv {
        MapEnv::new("/")
            .set("STARWIRE_MAX_INFLIGHT", value)
            .set("PS_ENABLE_POLLING", value)
            .set("STARWIRE_DRIVER", value)
    }

    #[test]
    fn booleans_as_tensorflow_reads_them() {
        for (text, expected) in
            [("true", true), ("TRUE", true), ("1", true), ("false", false), ("False", false), ("0", false)]
        {
            assert_eq!(Reader::new(&env(text)).boolean("PS_ENABLE_POLLING", !expected).unwrap(), expected);
        }
        for text in ["", "yes", "on", "2", "tru"] {
            let error = Reader::new(&env(text)).boolean("PS_ENABLE_POLLING", false).unwrap_err().to_string();
            assert_eq!(error, format!("PS_ENABLE_POLLING={text:?} is invalid: it must be true, false, 1 or 0"));
        }
    }

    #[test]
    fn numbers_in_their_range() {
        let read =
            |text: &str| Reader::new(&env(text)).number("STARWIRE_MAX_INFLIGHT", 3, 2..=10).map_err(|e| e.to_string());
        assert_eq!(read("2"), Ok(2));
        assert_eq!(read(" 10 "), Ok(10));
        for text in ["1", "11", "-2", "+2", "2.0", "", "99999999999999999999999"] {
            assert_eq!(
                read(text).unwrap_err(),
                format!("STARWIRE_MAX_INFLIGHT={text:?} is invalid: it must be a whole number from 2 to 10")
            );
        }
    }

    #[test]
    fn bytes_with_suffixes() {
        let read = |text: &str| Reader::new(&env(text)).bytes("STARWIRE_MAX_INFLIGHT", 0, 0..=1 << 40).ok();
        assert_eq!(read("4096"), Some(4096));
        assert_eq!(read("4k"), Some(4096));
        assert_eq!(read("1T"), Some(1 << 40));
        for text in ["2T", "G", "1.5G", "1GB", "18446744073709551615T", "é"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn choices_are_listed_when_none_fits() {
        let choices = [("auto", 0), ("epoll", 1)];
        let read =
            |text: &str| Reader::new(&env(text)).choice("STARWIRE_DRIVER", &choices, "auto").map_err(|e| e.to_string());
        assert_eq!(read("EPOLL"), Ok(1));
        assert_eq!(read("kqueue").unwrap_err(), "STARWIRE_DRIVER=\"kqueue\" is invalid: it must be one of auto, epoll");
    }

    #[test]
    fn text_that_is_not_utf8_is_an_error() {
        use std::os::unix::ffi::OsStringExt;
        let env = MapEnv::new("/").set("STARWIRE_DRIVER", std::ffi::OsString::from_vec(vec![0xff]));
        let error = Reader::new(&env).text("STARWIRE_DRIVER").unwrap_err().to_string();
        assert!(error.ends_with("it must be UTF-8 text"), "{error}");
    }

    #[test]
    fn unknown_variables_are_named_with_the_nearest_known_one() {
        let env = MapEnv::new("/")
            .set("STARWIRE_KEEPALIVE", "1")
            .set("STARWIRE_DRIVRE", "epoll")
            .set("STARWIRE_COMPLETELY_DIFFERENT", "1")
            .set("STARWIRE_UNIX", "off")
            .set("STARWIRE_TEST_PROTOCOL", "x")
            .set("HOME", "/");
        assert_eq!(
            unknown_variables(&env),
            [
                "STARWIRE_COMPLETELY_DIFFERENT is set but is not a variable of starwire",
                "STARWIRE_DRIVRE is set but is not a variable of starwire; did you mean STARWIRE_DRIVER?",
                "STARWIRE_KEEPALIVE is set but is not a variable of starwire; did you mean STARWIRE_KEEPALIVE_MS?",
            ]
        );
    }

    #[test]
    fn edit_distances() {
        for (a, b, distance) in [("", "", 0), ("a", "", 1), ("", "ab", 2), ("kitten", "sitting", 3), ("abc", "abc", 0)]
        {
            assert_eq!(edit_distance(a, b), distance);
        }
    }
}
