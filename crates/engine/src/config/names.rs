//! The names under which clients reach this task's control service.

use std::collections::BTreeSet;

use super::address::{HostAndMaybePort, is_loopback};

/// The task's own names. Two names are equal if this host's resolver can complete them to the same name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OwnNames {
    complete: BTreeSet<String>,
    search: Vec<String>,
}

impl OwnNames {
    /// `search`: the domains in which this host's resolver looks for a name.
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>, search: Vec<String>) -> Self {
        let complete = names.into_iter().flat_map(|name| completions(name, &search)).collect();
        Self { complete, search }
    }

    /// Returns whether `authority`, a host with or without a port, is an address, localhost or an own name. Only other
    /// names can be made to resolve to this host by a foreign DNS server.
    pub fn include(&self, authority: &str) -> bool {
        let Ok(HostAndMaybePort { host, .. }) = authority.parse() else { return false };
        let is_address = authority.starts_with('[') || host.parse::<std::net::Ipv4Addr>().is_ok();
        is_address || is_loopback(&host) || completions(&host, &self.search).any(|name| self.complete.contains(&name))
    }
}

/// Returns the name and its completions with the search domains.
fn completions<'a>(name: &str, search: &'a [String]) -> impl Iterator<Item = String> + use<'a> {
    let name = name.to_ascii_lowercase();
    let (bare, is_complete) = match name.strip_suffix('.') {
        Some(bare) => (bare.to_owned(), true),
        None => (name, false),
    };
    let domains = if is_complete { &[] } else { search };
    let completed: Vec<String> = domains.iter().map(|domain| format!("{bare}.{domain}")).collect();
    std::iter::once(bare).chain(completed)
}

/// Returns the search domains of a resolv.conf(5): those of the last `search` or `domain` line.
pub(super) fn search_domains(resolv_conf: &str) -> Vec<String> {
    let words = |line: &'static str| move |text: &str| text.split_whitespace().next() == Some(line);
    let last = resolv_conf.lines().rfind(|line| words("search")(line) || words("domain")(line));
    let domains = last.into_iter().flat_map(|line| line.split_whitespace().skip(1));
    domains.map(|domain| domain.trim_matches('.').to_ascii_lowercase()).filter(|domain| !domain.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn in_kubernetes() -> OwnNames {
        let search =
            search_domains("nameserver 10.0.0.10\nsearch ns.svc.cluster.local svc.cluster.local Cluster.Local.\n");
        OwnNames::new(["ps-0.ps", "Node-7.example.com"], search)
    }

    #[test]
    fn addresses_and_localhost_are_always_included() {
        for authority in
            ["127.0.0.1", "10.0.0.7:2222", "[::1]:2222", "[2001:db8::7]", "localhost", "LOCALHOST:80", "localhost."]
        {
            assert!(OwnNames::default().include(authority), "{authority}");
        }
    }

    #[test]
    fn own_names_are_included_in_every_form() {
        for authority in [
            "ps-0.ps",
            "ps-0.ps:2222",
            "PS-0.ps.",
            "ps-0.ps.ns",
            "ps-0.ps.ns.svc",
            "ps-0.ps.ns.svc.cluster.local:2222",
            "ps-0.ps.ns.svc.cluster.local.",
            "node-7.example.com",
        ] {
            assert!(in_kubernetes().include(authority), "{authority}");
        }
        let short = OwnNames::new(["ps0.corp.example"], search_domains("domain other\nsearch corp.example"));
        assert!(short.include("ps0:1") && short.include("ps0.corp.example") && !short.include("ps0.other"));
    }

    #[test]
    fn foreign_names_are_not_included() {
        for authority in [
            "",
            ":80",
            "evil.example",
            "evil.example:2222",
            "ps-0",
            "ps-0.ps.evil.example",
            "ps-0.ps.cluster.local.evil.example",
            "xps-0.ps",
            "localhost.evil.example",
            "127.0.0.1.evil.example",
            "evil.example@127.0.0.1",
            "127.0.0.1@evil.example",
            "127.1",
            "2130706433",
            "0x7f.0.0.1",
            "::1",
            "[::1",
            "[evil.example]",
            "127.0.0.1:80:80",
            "localhost evil.example",
            "lo\u{441}alhost",
        ] {
            assert!(!in_kubernetes().include(authority), "{authority}");
        }
    }

    #[test]
    fn resolv_conf() {
        assert!(search_domains("").is_empty() && search_domains("# search a\nnameserver 1.1.1.1\nsearch\n").is_empty());
        assert_eq!(search_domains("search a b.\n  domain\tC\n; search d"), ["c"]);
    }
}
