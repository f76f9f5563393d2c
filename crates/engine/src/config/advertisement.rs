//! A server's advertisement: one line of printable ASCII that fits into a field of TensorFlow's own `GetStatus` reply.
//!
//! `starwire/1;protocol=grpc%2B%2B;task=…;incarnation=00c0ffee…;data=10.0.0.7:4711,[2001:db8::7]:4711;unix=…;host=…;pid=4242`
//!
//! Values are percent-encoded. Unknown keys are skipped, so that newer servers can add some.

use std::fmt::{self, Write};
use std::str::FromStr;

use super::address::{AddressError, HostPort};

/// Longest line that is parsed.
pub const MAX_LEN: usize = 8192;
const MAGIC: &str = "starwire/";
const VERSION: &str = "1";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Advertisement {
    pub protocol: String,
    /// "/job:ps/replica:0/task:0"
    pub task: String,
    pub incarnation: u64,
    /// Addresses of the data port, best first; never empty.
    pub data: Vec<HostPort>,
    /// Unix socket for peers on the same host; a leading '@' stands for the abstract name space.
    pub unix: Option<String>,
    /// Equal on two servers only if they can reach each other's unix sockets: same boot of the same machine.
    pub host: Option<String>,
    pub pid: Option<u32>,
}

impl fmt::Display for Advertisement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{MAGIC}{VERSION};protocol={};task={}", Encoded(&self.protocol), Encoded(&self.task))?;
        write!(f, ";incarnation={:016x};data=", self.incarnation)?;
        for (i, address) in self.data.iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { "," }, Encoded(&address.to_string()))?;
        }
        if let Some(unix) = &self.unix {
            write!(f, ";unix={}", Encoded(unix))?;
        }
        if let Some(host) = &self.host {
            write!(f, ";host={}", Encoded(host))?;
        }
        if let Some(pid) = self.pid {
            write!(f, ";pid={pid}")?;
        }
        Ok(())
    }
}

impl FromStr for Advertisement {
    type Err = AdvertisementError;

    fn from_str(text: &str) -> Result<Self, AdvertisementError> {
        use AdvertisementError as E;
        if text.len() > MAX_LEN {
            return Err(E::TooLong(text.len()));
        }
        if let Some(bad) = text.bytes().position(|b| !b.is_ascii_graphic()) {
            return Err(E::NotPrintable(bad));
        }
        let mut items = text.split(';');
        let version = items.next().and_then(|first| first.strip_prefix(MAGIC)).ok_or(E::NotStarwire)?;
        if version != VERSION {
            return Err(E::Version(version.to_owned()));
        }
        let mut seen: Vec<(&str, &str)> = Vec::new();
        for item in items {
            let (key, value) = item.split_once('=').ok_or_else(|| E::NoValue(item.to_owned()))?;
            if seen.iter().any(|(other, _)| *other == key) {
                return Err(E::Twice(key.to_owned()));
            }
            seen.push((key, value));
        }
        let find = |key: &'static str| seen.iter().find(|(k, _)| *k == key).map(|(_, value)| *value);
        let text_of = |key: &'static str| find(key).map(|value| decode(key, value)).transpose();
        let need = |key: &'static str| E::Missing(key);

        let incarnation = find("incarnation").ok_or(need("incarnation"))?;
        let data = find("data").ok_or(need("data"))?;
        Ok(Self {
            protocol: text_of("protocol")?.ok_or(need("protocol"))?,
            task: text_of("task")?.ok_or(need("task"))?,
            incarnation: hex16(incarnation)
                .ok_or_else(|| E::Bad { key: "incarnation", value: incarnation.to_owned() })?,
            data: data.split(',').map(parse_data).collect::<Result<_, _>>()?,
            unix: text_of("unix")?,
            host: text_of("host")?,
            pid: find("pid").map(parse_pid).transpose()?,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AdvertisementError {
    #[error("the peer's advertisement is not from starwire")]
    NotStarwire,
    #[error(
        "the peer's advertisement has version {0:?}, this side understands {VERSION}: use the same starwire release on all tasks"
    )]
    Version(String),
    #[error("the peer's advertisement is {0} bytes long, at most {MAX_LEN} are allowed")]
    TooLong(usize),
    #[error("the peer's advertisement has a byte that is not printable ASCII at offset {0}")]
    NotPrintable(usize),
    #[error("the peer's advertisement has {0:?} instead of key=value")]
    NoValue(String),
    #[error("the peer's advertisement has {0:?} twice")]
    Twice(String),
    #[error("the peer's advertisement lacks {0:?}")]
    Missing(&'static str),
    #[error("the peer's advertisement has an invalid {key}: {value:?}")]
    Bad { key: &'static str, value: String },
    #[error("the peer's advertisement has an invalid data address {value:?}: {error}")]
    BadData { value: String, error: AddressError },
}

struct Encoded<'a>(&'a str);

impl fmt::Display for Encoded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for &byte in self.0.as_bytes() {
            if byte.is_ascii_alphanumeric() || b"-._~/:@[]".contains(&byte) {
                f.write_char(char::from(byte))?;
            } else {
                write!(f, "%{byte:02X}")?;
            }
        }
        Ok(())
    }
}

fn decode(key: &'static str, value: &str) -> Result<String, AdvertisementError> {
    let bad = || AdvertisementError::Bad { key, value: value.to_owned() };
    let mut out = Vec::with_capacity(value.len());
    let mut bytes = value.bytes();
    while let Some(byte) = bytes.next() {
        if byte != b'%' {
            out.push(byte);
            continue;
        }
        let mut digit = || bytes.next().and_then(|b| char::from(b).to_digit(16)).and_then(|d| u8::try_from(d).ok());
        let (high, low) = (digit().ok_or_else(bad)?, digit().ok_or_else(bad)?);
        out.push(high << 4 | low);
    }
    let text = String::from_utf8(out).map_err(|_| bad())?;
    if text.is_empty() || text.contains('\0') { Err(bad()) } else { Ok(text) }
}

fn hex16(text: &str) -> Option<u64> {
    let digits = text.len() == 16 && text.bytes().all(|b| b.is_ascii_hexdigit());
    if digits { u64::from_str_radix(text, 16).ok() } else { None }
}

fn parse_data(text: &str) -> Result<HostPort, AdvertisementError> {
    let address: HostPort =
        decode("data", text)?.parse().map_err(|error| AdvertisementError::BadData { value: text.to_owned(), error })?;
    if address.port == 0 {
        return Err(AdvertisementError::BadData {
            value: text.to_owned(),
            error: AddressError::BadPort("0".to_owned()),
        });
    }
    Ok(address)
}

fn parse_pid(text: &str) -> Result<u32, AdvertisementError> {
    let digits = text.bytes().all(|b| b.is_ascii_digit());
    let pid = if digits { text.parse().ok() } else { None };
    pid.filter(|&pid| pid > 0).ok_or_else(|| AdvertisementError::Bad { key: "pid", value: text.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn example() -> Advertisement {
        Advertisement {
            protocol: "grpc++".to_owned(),
            task: "/job:ps/replica:0/task:0".to_owned(),
            incarnation: 0xc0ffee,
            data: vec!["10.0.0.7:4711".parse().unwrap(), "[2001:db8::7]:4711".parse().unwrap()],
            unix: Some("/tmp/a b;c=d,e%".to_owned()),
            host: Some("boot-1".to_owned()),
            pid: Some(42),
        }
    }

    const LINE: &str = "starwire/1;protocol=grpc%2B%2B;task=/job:ps/replica:0/task:0;incarnation=0000000000c0ffee;\
                        data=10.0.0.7:4711,[2001:db8::7]:4711;unix=/tmp/a%20b%3Bc%3Dd%2Ce%25;host=boot-1;pid=42";

    #[test]
    fn the_line_as_it_is_written_and_read() {
        assert_eq!(example().to_string(), LINE);
        assert_eq!(LINE.parse::<Advertisement>().unwrap(), example());
    }

    #[test]
    fn unknown_keys_are_skipped_and_optional_ones_may_lack() {
        let line = "starwire/1;new=%zz;incarnation=0000000000c0ffee;task=t;protocol=p;data=h:1;future=1";
        let parsed: Advertisement = line.parse().unwrap();
        assert_eq!((parsed.unix, parsed.host, parsed.pid), (None, None, None));
    }

    #[test]
    fn what_is_refused_and_why() {
        use AdvertisementError as E;
        let bad = |key, value: &str| E::Bad { key, value: value.to_owned() };
        let replaced = |from: &str, to: &str| LINE.replace(from, to);
        for (line, error) in [
            (String::new(), E::NotStarwire),
            ("grpc".to_owned(), E::NotStarwire),
            (replaced("starwire/1", "starwire/2"), E::Version("2".into())),
            (replaced(";pid", ";;pid"), E::NoValue(String::new())),
            (format!("{LINE};pid=1"), E::Twice("pid".into())),
            (replaced("task=", "tsk="), E::Missing("task")),
            (replaced("data=", "daten="), E::Missing("data")),
            (replaced("00c0ffee", "c0ffee"), bad("incarnation", "00000000c0ffee")),
            (replaced("c0ffee", "c0ffeg"), bad("incarnation", "0000000000c0ffeg")),
            (replaced("pid=42", "pid=0"), bad("pid", "0")),
            (replaced("pid=42", "pid=+1"), bad("pid", "+1")),
            (replaced("boot-1", "%4"), bad("host", "%4")),
            (replaced("boot-1", "%FF"), bad("host", "%FF")),
            (replaced("boot-1", "a%00"), bad("host", "a%00")),
            (replaced("boot-1", ""), bad("host", "")),
            (replaced("boot-1", "a b"), E::NotPrintable(LINE.find("boot").unwrap() + 1)),
            ("x".repeat(MAX_LEN + 1), E::TooLong(MAX_LEN + 1)),
            (
                replaced("10.0.0.7:4711", "10.0.0.7:0"),
                E::BadData { value: "10.0.0.7:0".into(), error: AddressError::BadPort("0".into()) },
            ),
        ] {
            assert_eq!(line.parse::<Advertisement>().unwrap_err(), error, "{line}");
        }
    }

    proptest! {
        #[test]
        fn any_input_is_answered(text in "(starwire/1)?[ -~é]{0,80}") {
            let _ = text.parse::<Advertisement>();
        }

        #[test]
        fn whatever_is_told_is_understood(
            protocol in "[^\0]{1,20}", task in "[^\0]{1,40}", incarnation: u64,
            unix in proptest::option::of("[^\0]{1,40}"), host in proptest::option::of("[^\0]{1,40}"),
            pid in proptest::option::of(1u32..), ports in proptest::collection::vec(1u16.., 1..4),
        ) {
            let data = ports.into_iter().map(|port| HostPort { host: "h".to_owned(), port }).collect();
            let said = Advertisement { protocol, task, incarnation, data, unix, host, pid };
            let line = said.to_string();
            prop_assert!(line.bytes().all(|b| b.is_ascii_graphic()));
            prop_assert_eq!(line.parse::<Advertisement>().unwrap(), said);
        }
    }
}
