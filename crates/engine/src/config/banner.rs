//! The line that a server logs when it starts.

use std::fmt::Write;
use std::net::SocketAddr;

use super::{Config, UnixSockets};

/// Facts that are known only once the server runs.
#[derive(Clone, Copy, Debug)]
pub struct Running<'a> {
    /// "epoll" or "io_uring"
    pub driver: &'a str,
    pub bound: SocketAddr,
}

impl Config {
    /// `starwire: grpc++ on 4 reactors (io_uring, poll=off, pin=off), data port 10.0.0.7:4711 …`: the effective
    /// settings, then the variables that are set.
    pub fn banner(&self, running: Running<'_>) -> String {
        let on = |yes| if yes { "on" } else { "off" };
        let mut line = format!(
            "starwire: {} on {} reactor{} ({}, poll={}, pin={}), data port {}, endpoint map {}, connection timeout {} ms, \
             keep-alive {}+{} ms, unix={}, secret={}, tls={}, control={}",
            self.identity.protocol,
            self.reactors,
            if self.reactors == 1 { "" } else { "s" },
            running.driver,
            on(self.polling),
            on(self.pinning),
            running.bound,
            self.endpoint_map.as_ref().map_or_else(|| "none".to_owned(), |map| map.path().display().to_string()),
            self.connect_timeout.as_millis(),
            self.keepalive.interval.as_millis(),
            self.keepalive.timeout.as_millis(),
            match self.unix {
                UnixSockets::Auto => "auto",
                UnixSockets::Socket => "socket",
                UnixSockets::Off => "off",
            },
            on(self.secret.is_some()),
            on(self.tls.is_some()),
            match self.control {
                super::ControlAccess::Everybody => "on",
                super::ControlAccess::Loopback => "loopback",
                super::ControlAccess::Nobody => "off",
            },
        );
        let mut separator = "; set:";
        for setting in self.settings.iter().filter(|s| !s.is_default) {
            // Writing to a String cannot fail.
            let _ = write!(line, "{separator} {}={}", setting.name, setting.value);
            separator = "";
        }
        line
    }
}
