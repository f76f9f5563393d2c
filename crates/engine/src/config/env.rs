//! The environment as a trait, so that tests need not touch the process's own.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io;
use std::path::PathBuf;

use super::names;
use crate::system::environment;

pub trait Env {
    fn var(&self, name: &str) -> Option<OsString>;
    /// A variable whose value nobody else should see.
    fn secret(&self, name: &str) -> Option<OsString> {
        self.var(name)
    }
    /// Names of all variables that are set (those that are valid UTF-8).
    fn names(&self) -> Vec<String>;
    fn current_dir(&self) -> io::Result<PathBuf>;
    /// The machine's host name; `None` if it cannot be determined.
    fn host_name(&self) -> Option<String>;

    /// The domains in which the resolver looks for names.
    fn search_domains(&self) -> Vec<String> {
        Vec::new()
    }
}

/// The process's own environment.
pub struct ProcessEnv;

impl Env for ProcessEnv {
    fn var(&self, name: &str) -> Option<OsString> {
        std::env::var_os(name)
    }

    fn secret(&self, name: &str) -> Option<OsString> {
        environment::take(name)
    }

    fn names(&self) -> Vec<String> {
        std::env::vars_os().filter_map(|(name, _)| name.into_string().ok()).collect()
    }

    fn current_dir(&self) -> io::Result<PathBuf> {
        std::env::current_dir()
    }

    fn host_name(&self) -> Option<String> {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").ok()?;
        let name = name.trim();
        (!name.is_empty()).then(|| name.to_owned())
    }

    fn search_domains(&self) -> Vec<String> {
        names::search_domains(&std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default())
    }
}

/// A made-up environment, for tests and tools.
#[derive(Clone, Debug, Default)]
pub struct MapEnv {
    pub vars: BTreeMap<String, OsString>,
    pub dir: PathBuf,
    pub host_name: Option<String>,
}

impl MapEnv {
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { vars: BTreeMap::new(), dir: dir.into(), host_name: Some("test-host".to_owned()) }
    }

    #[must_use]
    pub fn set(mut self, name: &str, value: impl Into<OsString>) -> Self {
        self.vars.insert(name.to_owned(), value.into());
        self
    }
}

impl Env for MapEnv {
    fn var(&self, name: &str) -> Option<OsString> {
        self.vars.get(name).cloned()
    }

    fn names(&self) -> Vec<String> {
        self.vars.keys().cloned().collect()
    }

    fn current_dir(&self) -> io::Result<PathBuf> {
        Ok(self.dir.clone())
    }

    fn host_name(&self) -> Option<String> {
        self.host_name.clone()
    }
}
