//! Parsing of hosts and ports, and the addresses to bind.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::str::FromStr;

/// A host (name, IPv4 or IPv6 address without brackets) and a port. Written `host:port`, IPv6 in brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostPort {
    pub host: String,
    pub port: u16,
}

impl HostPort {
    /// Resolves the name; may block. Repeated at each reconnect, because addresses change.
    pub fn resolve(&self) -> io::Result<Vec<SocketAddr>> {
        let found: Vec<SocketAddr> = (self.host.as_str(), self.port).to_socket_addrs()?.collect();
        if found.is_empty() {
            return Err(io::Error::new(io::ErrorKind::NotFound, format!("{} has no address", self.host)));
        }
        Ok(found)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", Bracketed(&self.host), self.port)
    }
}

impl FromStr for HostPort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        match HostAndMaybePort::from_str(text)? {
            HostAndMaybePort { host, port: Some(port) } => Ok(Self { host, port }),
            HostAndMaybePort { port: None, .. } => Err(AddressError::NoPort),
        }
    }
}

/// A host with or without a port, as in `STARWIRE_BIND`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostAndMaybePort {
    pub host: String,
    pub port: Option<u16>,
}

impl fmt::Display for HostAndMaybePort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", Bracketed(&self.host)),
            None => write!(f, "{}", Bracketed(&self.host)),
        }
    }
}

impl FromStr for HostAndMaybePort {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        if let Some(rest) = text.strip_prefix('[') {
            let (host, rest) = rest.split_once(']').ok_or(AddressError::OpenBracket)?;
            check_ipv6(host)?;
            let port = match rest {
                "" => None,
                _ => Some(parse_port(rest.strip_prefix(':').ok_or(AddressError::AfterBracket)?)?),
            };
            return Ok(Self { host: host.to_owned(), port });
        }
        if text.matches(':').count() > 1 {
            // A bare IPv6 address is fine where no port can follow; "::1:80" would be ambiguous.
            return match check_ipv6(text) {
                Ok(()) => Err(AddressError::Unbracketed),
                Err(_) => Err(AddressError::TooManyColons),
            };
        }
        let (host, port) = match text.split_once(':') {
            Some((host, port)) => (host, Some(parse_port(port)?)),
            None => (text, None),
        };
        check_name_or_ipv4(host)?;
        Ok(Self { host: host.to_owned(), port })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    #[error("the host is empty")]
    NoHost,
    #[error("the port is missing (host:port)")]
    NoPort,
    #[error("{0:?} is not a port (0 to 65535)")]
    BadPort(String),
    #[error("the closing bracket of the IPv6 address is missing")]
    OpenBracket,
    #[error("only :port may follow the closing bracket")]
    AfterBracket,
    #[error("an IPv6 address needs brackets: [::1]:2222")]
    Unbracketed,
    #[error("more than one colon, but not an IPv6 address")]
    TooManyColons,
    #[error("{0:?} is not an IPv6 address")]
    BadIpv6(String),
    #[error("{0:?} is not an IPv4 address")]
    BadIpv4(String),
    #[error("{0:?} is not a host name (letters, digits, '-', '_', '.', at most 253 characters)")]
    BadName(String),
}

/// Whether this host name means the local machine everywhere.
pub fn is_loopback(host: &str) -> bool {
    match host.parse::<IpAddr>() {
        Ok(ip) => ip.is_loopback(),
        Err(_) => {
            let host = host.strip_suffix('.').unwrap_or(host);
            host.eq_ignore_ascii_case("localhost") || host.to_ascii_lowercase().ends_with(".localhost")
        }
    }
}

/// Whether the host stands for all local addresses, to which no peer can connect.
pub fn is_unspecified(host: &str) -> bool {
    host.parse::<IpAddr>().is_ok_and(|ip| ip.is_unspecified())
}

/// Default addresses to listen on, in order of preference: the first that can be bound is used. `host` is the name that
/// peers use. An entry `[::]` means dual stack (IPV6_V6ONLY off).
pub fn default_bind(host: &str, port: u16) -> Vec<SocketAddr> {
    let at = |ip: IpAddr| SocketAddr::new(ip, port);
    let v4_any = at(Ipv4Addr::UNSPECIFIED.into());
    let v6_any = at(Ipv6Addr::UNSPECIFIED.into());
    match host.parse::<IpAddr>() {
        Ok(ip) if ip.is_loopback() => vec![at(ip)],
        Ok(IpAddr::V4(_)) => vec![v4_any],
        Ok(IpAddr::V6(_)) => vec![v6_any],
        Err(_) if is_loopback(host) => vec![at(Ipv4Addr::LOCALHOST.into()), at(Ipv6Addr::LOCALHOST.into())],
        Err(_) => vec![v6_any, v4_any],
    }
}

struct Bracketed<'a>(&'a str);

impl fmt::Display for Bracketed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.contains(':') { write!(f, "[{}]", self.0) } else { f.write_str(self.0) }
    }
}

fn parse_port(text: &str) -> Result<u16, AddressError> {
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let port = if digits { text.parse().ok() } else { None };
    port.ok_or_else(|| if text.is_empty() { AddressError::NoPort } else { AddressError::BadPort(text.to_owned()) })
}

fn check_ipv6(host: &str) -> Result<(), AddressError> {
    let bad = || AddressError::BadIpv6(host.to_owned());
    let (address, zone) = match host.split_once('%') {
        Some((address, zone)) => (address, Some(zone)),
        None => (host, None),
    };
    address.parse::<Ipv6Addr>().map_err(|_| bad())?;
    // A zone is an interface name: at most IFNAMSIZ - 1 characters.
    let zone_fits = |zone: &str| {
        (1..=15).contains(&zone.len()) && zone.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.@".contains(&b))
    };
    if zone.is_some_and(|zone| !zone_fits(zone)) { Err(bad()) } else { Ok(()) }
}

fn check_name_or_ipv4(host: &str) -> Result<(), AddressError> {
    if host.is_empty() {
        return Err(AddressError::NoHost);
    }
    // Underscores are not standard, but container names have them.
    let allowed = host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
    let labels = host.strip_suffix('.').unwrap_or(host).split('.');
    if !allowed || host.len() > 253 || labels.into_iter().any(|label| label.is_empty() || label.len() > 63) {
        return Err(AddressError::BadName(host.to_owned()));
    }
    // Only digits and dots must be an IPv4 address; getaddrinfo would read "10.1" as 10.0.0.1.
    let numeric = host.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    if numeric && host.parse::<Ipv4Addr>().is_err() { Err(AddressError::BadIpv4(host.to_owned())) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Result<HostPort, AddressError> {
        text.parse()
    }

    #[test]
    fn what_people_write() {
        for (text, host, port) in [
            ("ps0:2222", "ps0", 2222),
            ("ps_0.team.svc.cluster.local:1", "ps_0.team.svc.cluster.local", 1),
            ("10.0.0.7:65535", "10.0.0.7", 65535),
            ("[::1]:80", "::1", 80),
            ("[fe80::1%eth0]:80", "fe80::1%eth0", 80),
            ("localhost:0", "localhost", 0),
        ] {
            let parsed = parse(text).unwrap();
            assert_eq!((parsed.host.as_str(), parsed.port), (host, port));
            assert_eq!(parsed.to_string(), text);
        }
    }

    #[test]
    fn what_is_refused_and_why() {
        for (text, error) in [
            ("", AddressError::NoHost),
            ("host", AddressError::NoPort),
            ("host:", AddressError::NoPort),
            (":80", AddressError::NoHost),
            ("host:65536", AddressError::BadPort("65536".into())),
            ("host:+80", AddressError::BadPort("+80".into())),
            ("host: 80", AddressError::BadPort(" 80".into())),
            ("host:-1", AddressError::BadPort("-1".into())),
            ("::1", AddressError::Unbracketed),
            ("::1:80", AddressError::Unbracketed),
            ("a:b:c", AddressError::TooManyColons),
            ("[::1", AddressError::OpenBracket),
            ("[::1]80", AddressError::AfterBracket),
            ("[::1]", AddressError::NoPort),
            ("[::g]:80", AddressError::BadIpv6("::g".into())),
            ("[10.0.0.1]:80", AddressError::BadIpv6("10.0.0.1".into())),
            ("[fe80::1%]:80", AddressError::BadIpv6("fe80::1%".into())),
            ("10.0.0:80", AddressError::BadIpv4("10.0.0".into())),
            ("10.0.0.256:80", AddressError::BadIpv4("10.0.0.256".into())),
            ("a b:80", AddressError::BadName("a b".into())),
            ("a..b:80", AddressError::BadName("a..b".into())),
            ("hôte:80", AddressError::BadName("hôte".into())),
        ] {
            assert_eq!(parse(text).unwrap_err(), error, "{text:?}");
        }
    }

    #[test]
    fn default_bind_follows_the_family_of_the_own_entry() {
        let bind = |host| default_bind(host, 7).iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(bind("10.1.2.3"), ["0.0.0.0:7"]);
        assert_eq!(bind("2001:db8::1"), ["[::]:7"]);
        assert_eq!(bind("ps0.example.org"), ["[::]:7", "0.0.0.0:7"]);
        assert_eq!(bind("localhost"), ["127.0.0.1:7", "[::1]:7"]);
        assert_eq!(bind("127.0.0.1"), ["127.0.0.1:7"]);
        assert_eq!(bind("::1"), ["[::1]:7"]);
    }

    #[test]
    fn loopback_is_recognised_by_name_and_number() {
        for host in ["localhost", "LOCALHOST", "a.localhost", "localhost.", "127.0.0.1", "127.8.8.8", "::1"] {
            assert!(is_loopback(host), "{host}");
        }
        for host in ["localhost.example.org", "10.0.0.1", "ps0", "::"] {
            assert!(!is_loopback(host), "{host}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in ".{0,40}") {
            let _ = parse(&text);
        }

        #[test]
        fn what_is_accepted_prints_as_it_was_written(text in "(\\[[0-9a-f:]{1,20}\\]|[a-z0-9._-]{1,20}):[0-9]{1,5}") {
            if let Ok(parsed) = parse(&text) {
                prop_assert_eq!(parse(&parsed.to_string()).unwrap(), parsed);
            }
        }
    }
}
