//! Kinds of values: how the text of a variable becomes a value, and what the text may be.

use std::fmt::Display;
use std::net::IpAddr;
use std::ops::RangeInclusive;

use super::address::HostAndMaybePort;
use super::joinable::Joinable;
use super::state::StateFrom;
use crate::tls::Names;

pub trait Kind: Sync {
    type Value;

    /// `default` is the row's, for values that may be given in part. The error is what the value must be.
    fn parse(&self, text: &str, default: &str) -> Result<Self::Value, String>;

    /// The value of a row without a default.
    fn unset(&self) -> Result<Self::Value, String> {
        Err("set".to_owned())
    }

    /// For the banner and the statistics.
    fn show(&self, value: &Self::Value) -> String;

    /// For the documentation.
    fn describe(&self) -> String;

    fn empty_is_unset(&self) -> bool {
        false
    }

    /// Whether neither messages nor statistics may contain the value.
    fn is_secret(&self) -> bool {
        false
    }
}

/// A variable that has no default.
pub struct Optional<K>(pub K);

impl<K: Kind> Kind for Optional<K> {
    type Value = Option<K::Value>;

    fn parse(&self, text: &str, default: &str) -> Result<Self::Value, String> {
        self.0.parse(text, default).map(Some)
    }

    fn unset(&self) -> Result<Self::Value, String> {
        Ok(None)
    }

    fn show(&self, value: &Self::Value) -> String {
        value.as_ref().map_or_else(String::new, |value| self.0.show(value))
    }

    fn describe(&self) -> String {
        self.0.describe()
    }

    fn empty_is_unset(&self) -> bool {
        self.0.empty_is_unset()
    }

    fn is_secret(&self) -> bool {
        self.0.is_secret()
    }
}

/// `true`, `false`, `1` or `0` in any case, like TensorFlow's own switches.
pub struct Flag;

impl Kind for Flag {
    type Value = bool;

    fn parse(&self, text: &str, _: &str) -> Result<bool, String> {
        match text.trim().to_ascii_lowercase().as_str() {
            "true" | "1" => Ok(true),
            "false" | "0" => Ok(false),
            _ => Err("true, false, 1 or 0".to_owned()),
        }
    }

    fn show(&self, value: &bool) -> String {
        value.to_string()
    }

    fn describe(&self) -> String {
        "`true`, `false`".to_owned()
    }
}

pub struct Number<T>(pub RangeInclusive<T>);

impl<T: Copy + PartialOrd + Display + TryFrom<u64> + Sync> Kind for Number<T> {
    type Value = T;

    fn parse(&self, text: &str, _: &str) -> Result<T, String> {
        let number = digits(text.trim()).and_then(|n| T::try_from(n).ok()).filter(|n| self.0.contains(n));
        number.ok_or_else(|| format!("a whole number from {} to {}", self.0.start(), self.0.end()))
    }

    fn show(&self, value: &T) -> String {
        value.to_string()
    }

    fn describe(&self) -> String {
        format!("{} to {}", self.0.start(), self.0.end())
    }
}

/// A number of bytes with an optional binary suffix.
pub struct Bytes(pub RangeInclusive<u64>);

impl Kind for Bytes {
    type Value = u64;

    fn parse(&self, text: &str, _: &str) -> Result<u64, String> {
        parse_bytes(text.trim()).filter(|n| self.0.contains(n)).ok_or_else(|| {
            format!("a number of bytes from {} to {} (suffixes K, M, G, T)", self.0.start(), self.0.end())
        })
    }

    fn show(&self, value: &u64) -> String {
        value.to_string()
    }

    fn describe(&self) -> String {
        format!("{} to {}", short(*self.0.start()), short(*self.0.end()))
    }
}

/// One of several names.
pub struct Choice<T: 'static>(pub &'static [(&'static str, T)]);

impl<T: Copy + PartialEq + Sync> Kind for Choice<T> {
    type Value = T;

    fn parse(&self, text: &str, _: &str) -> Result<T, String> {
        let found = self.0.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
        found.map(|(_, value)| *value).ok_or_else(|| format!("one of {}", self.names().join(", ")))
    }

    fn show(&self, value: &T) -> String {
        self.0.iter().find(|(_, known)| known == value).map_or_else(String::new, |(name, _)| (*name).to_owned())
    }

    fn describe(&self) -> String {
        format!("`{}`", self.names().join("`, `"))
    }
}

impl<T> Choice<T> {
    fn names(&self) -> Vec<&'static str> {
        self.0.iter().map(|(name, _)| *name).collect()
    }
}

/// One of the amounts of [`Amounts`].
pub struct Amount {
    pub key: &'static str,
    pub range: RangeInclusive<u64>,
    /// In bytes: suffixes are allowed.
    pub is_bytes: bool,
}

impl Amount {
    pub const fn number(key: &'static str, range: RangeInclusive<u64>) -> Self {
        Self { key, range, is_bytes: false }
    }

    pub const fn bytes(key: &'static str, range: RangeInclusive<u64>) -> Self {
        Self { key, range, is_bytes: true }
    }

    fn show(&self, value: u64) -> String {
        if self.is_bytes { short(value) } else { value.to_string() }
    }

    fn describe(&self) -> String {
        format!("{}={} to {}", self.key, self.show(*self.range.start()), self.show(*self.range.end()))
    }
}

/// Several limits in one variable: `small=16K,group=1M`. Amounts that the text does not name have their defaults.
pub struct Amounts<const N: usize>(pub [Amount; N]);

impl<const N: usize> Amounts<N> {
    fn parse_into(&self, text: &str, values: &mut [u64; N]) -> Option<()> {
        let mut seen = [false; N];
        for part in text.split(',') {
            let (key, value) = part.split_once('=')?;
            let at = self.0.iter().position(|amount| amount.key == key.trim())?;
            let amount = &self.0[at];
            let value = if amount.is_bytes { parse_bytes(value.trim()) } else { digits(value.trim()) };
            values[at] = value.filter(|value| amount.range.contains(value))?;
            if std::mem::replace(&mut seen[at], true) {
                return None;
            }
        }
        Some(())
    }
}

impl<const N: usize> Kind for Amounts<N> {
    type Value = [u64; N];

    fn parse(&self, text: &str, default: &str) -> Result<[u64; N], String> {
        let mut values = [0; N];
        self.parse_into(default, &mut values)
            .and_then(|()| self.parse_into(text, &mut values))
            .map(|()| values)
            .ok_or_else(|| {
                let each: Vec<String> = self.0.iter().map(Amount::describe).collect();
                format!("some of {}, each at most once, separated by commas", each.join(", "))
            })
    }

    fn show(&self, values: &[u64; N]) -> String {
        let each = self.0.iter().zip(values).map(|(amount, value)| format!("{}={}", amount.key, amount.show(*value)));
        each.collect::<Vec<_>>().join(",")
    }

    fn describe(&self) -> String {
        let each: Vec<String> = self.0.iter().map(|amount| format!("`{}`", amount.describe())).collect();
        each.join(", ")
    }
}

/// Text that is never shown. Set but empty is an error: the operator wanted a secret and has none.
pub struct Hidden;

impl Kind for Hidden {
    type Value = String;

    fn parse(&self, text: &str, _: &str) -> Result<String, String> {
        if text.is_empty() {
            return Err("it is set, but empty: unset it to run without a secret, or use STARWIRE_SECRET_FILE if this process was started by a server, which has emptied it".to_owned());
        }
        Ok(text.to_owned())
    }

    fn show(&self, _: &String) -> String {
        "set".to_owned()
    }

    fn describe(&self) -> String {
        "16 to 4096 bytes".to_owned()
    }

    fn is_secret(&self) -> bool {
        true
    }
}

/// Text of a certain form; empty is the same as unset.
pub struct Parsed<T: 'static> {
    parse: fn(&str) -> Result<T, String>,
    show: fn(&T) -> String,
    describe: &'static str,
}

impl<T> Kind for Parsed<T> {
    type Value = T;

    fn parse(&self, text: &str, _: &str) -> Result<T, String> {
        (self.parse)(text)
    }

    fn show(&self, value: &T) -> String {
        (self.show)(value)
    }

    fn describe(&self) -> String {
        self.describe.to_owned()
    }

    fn empty_is_unset(&self) -> bool {
        true
    }
}

/// Free text.
pub const fn text(describe: &'static str) -> Parsed<String> {
    Parsed { parse: |text| Ok(text.to_owned()), show: String::clone, describe }
}

/// A name in a handshake.
pub const CLUSTER_NAME: Parsed<String> = Parsed { parse: parse_cluster_name, show: String::clone, describe: PRINTABLE };
const PRINTABLE: &str = "at most 128 printable ASCII characters without spaces";

/// Names of jobs, as TensorFlow allows them.
pub const JOBS: Parsed<Vec<String>> =
    Parsed { parse: parse_jobs, show: |jobs| jobs.join(","), describe: "names separated by commas" };

/// Tasks that may join.
pub const JOINABLE: Parsed<Joinable> =
    Parsed { parse: Joinable::parse, show: Joinable::to_string, describe: "`job:number`, separated by commas" };

/// Where a state comes from.
pub const STATE_FROM: Parsed<StateFrom> =
    Parsed { parse: StateFrom::parse, show: StateFrom::to_string, describe: "`move=host:port` or `standby=host:port`" };

/// Names of certificates.
pub const CERTIFICATE_NAMES: Parsed<Names> =
    Parsed { parse: Names::parse, show: Names::to_string, describe: "names separated by commas" };

/// An address of this host, with or without a port.
pub const BIND_ADDRESS: Parsed<(IpAddr, Option<u16>)> = Parsed {
    parse: parse_bind_address,
    show: |(ip, port)| HostAndMaybePort { host: ip.to_string(), port: *port }.to_string(),
    describe: "IP address, or address and port",
};

fn parse_cluster_name(text: &str) -> Result<String, String> {
    let fits = text.len() <= 128 && text.bytes().all(|b| b.is_ascii_graphic());
    if fits { Ok(text.to_owned()) } else { Err(PRINTABLE.to_owned()) }
}

/// As TensorFlow allows them.
pub fn is_job(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

fn parse_jobs(text: &str) -> Result<Vec<String>, String> {
    let jobs: Vec<String> = text.split(',').map(|job| job.trim().to_owned()).collect();
    if jobs.iter().all(|job| is_job(job)) {
        Ok(jobs)
    } else {
        Err("job names (letters, digits, '_') separated by commas".to_owned())
    }
}

fn parse_bind_address(text: &str) -> Result<(IpAddr, Option<u16>), String> {
    if let Ok(ip) = text.parse() {
        return Ok((ip, None));
    }
    let parsed: Option<HostAndMaybePort> = text.parse().ok();
    let found = parsed.and_then(|parsed| Some((parsed.host.parse().ok()?, parsed.port)));
    found.ok_or_else(|| {
        "an IP address of this machine, with or without a port (0.0.0.0, 10.0.0.7:7000, [::], [::1]:7000)".to_owned()
    })
}

pub fn digits(text: &str) -> Option<u64> {
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

/// 16384 as "16K".
fn short(bytes: u64) -> String {
    let suffix = [(40, 'T'), (30, 'G'), (20, 'M'), (10, 'K')];
    let fits = |(shift, _): &(u32, char)| bytes != 0 && bytes % (1 << shift) == 0;
    match suffix.into_iter().find(fits) {
        Some((shift, suffix)) => format!("{}{suffix}", bytes >> shift),
        None => bytes.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_as_tensorflow_reads_them() {
        for (text, expected) in
            [("true", true), ("TRUE", true), (" 1", true), ("false", false), ("False", false), ("0", false)]
        {
            assert_eq!(Flag.parse(text, ""), Ok(expected));
        }
        for text in ["", "yes", "on", "2", "tru"] {
            assert_eq!(Flag.parse(text, "").unwrap_err(), "true, false, 1 or 0");
        }
    }

    #[test]
    fn numbers_in_their_range() {
        let number = Number::<u8>(2..=10);
        assert_eq!((number.parse("2", ""), number.parse(" 10 ", "")), (Ok(2), Ok(10)));
        for text in ["1", "11", "-2", "+2", "2.0", "", "258", "99999999999999999999999"] {
            assert_eq!(number.parse(text, "").unwrap_err(), "a whole number from 2 to 10", "{text}");
        }
    }

    #[test]
    fn bytes_with_suffixes() {
        let bytes = Bytes(0..=1 << 40);
        let read = |text: &str| bytes.parse(text, "").ok();
        assert_eq!((read("4096"), read("4k"), read("1T")), (Some(4096), Some(4096), Some(1 << 40)));
        for text in ["2T", "G", "1.5G", "1GB", "18446744073709551615T", "é"] {
            assert_eq!(read(text), None, "{text}");
        }
        assert_eq!([0, 1, 1 << 10, 3 << 20, 1 << 50].map(short), ["0", "1", "1K", "3M", "1024T"]);
    }

    #[test]
    fn choices_in_any_case() {
        let choice = Choice(&[("auto", 0), ("epoll", 1)]);
        assert_eq!((choice.parse("EPOLL", ""), choice.show(&1)), (Ok(1), "epoll".to_owned()));
        assert_eq!(choice.parse("kqueue", "").unwrap_err(), "one of auto, epoll");
    }

    #[test]
    fn amounts_keep_the_defaults_of_those_that_are_not_named() {
        let amounts = Amounts([Amount::bytes("small", 0..=1 << 30), Amount::number("items", 2..=9)]);
        let read = |text: &str| amounts.parse(text, "small=16K,items=3");
        assert_eq!(read("items=4"), Ok([16 << 10, 4]));
        assert_eq!(read(" items = 4 , small = 2M "), Ok([2 << 20, 4]));
        assert_eq!(amounts.show(&[2 << 20, 4]), "small=2M,items=4");
        for text in ["", "items", "items=1", "items=1K", "small=1,small=2", "large=1", "items=4,"] {
            let expected = "some of small=0 to 1G, items=2 to 9, each at most once, separated by commas";
            assert_eq!(read(text).unwrap_err(), expected, "{text}");
        }
    }
}
