//! What the kernel knows about a process.

use std::fs;
use std::time::Duration;

pub struct Process(u32);

/// At one moment.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen {
    pub rss_bytes: u64,
    pub cpu: Duration,
    pub threads: u64,
    pub descriptors: u64,
}

impl Process {
    pub fn new(pid: u32) -> Self {
        Self(pid)
    }

    pub fn own() -> Self {
        Self(std::process::id())
    }

    pub fn is_there(&self) -> bool {
        self.state().is_some_and(|state| state != "Z" && state != "X")
    }

    pub fn look(&self) -> Option<Seen> {
        let fields = self.stat()?;
        let ticks: u64 = fields.get(11)?.parse::<u64>().ok()? + fields.get(12)?.parse::<u64>().ok()?;
        Some(Seen {
            rss_bytes: self.status("VmRSS:")?,
            // The kernel counts in ticks of 10 ms.
            cpu: Duration::from_millis(ticks * 10),
            threads: fields.get(17)?.parse().ok()?,
            descriptors: fs::read_dir(format!("/proc/{}/fd", self.0)).ok()?.count() as u64,
        })
    }

    /// From now on `peak` means: since now.
    pub fn forget_peak(&self) {
        // Where it is not allowed the peak is that of the whole life.
        let _ = fs::write(format!("/proc/{}/clear_refs", self.0), "5");
    }

    /// The largest resident set so far, in bytes.
    pub fn peak(&self) -> Option<u64> {
        self.status("VmHWM:")
    }

    fn state(&self) -> Option<String> {
        self.stat()?.first().cloned()
    }

    fn stat(&self) -> Option<Vec<String>> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.0)).ok()?;
        // The name in parentheses may contain anything.
        Some(stat.rsplit_once(')')?.1.split_whitespace().map(str::to_owned).collect())
    }

    fn status(&self, name: &str) -> Option<u64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.0)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_can_be_seen() {
        let own = Process::own();
        assert!(own.is_there());
        let seen = own.look().unwrap();
        assert!(seen.rss_bytes > 1 << 20 && seen.threads >= 1 && seen.descriptors >= 3, "{seen:?}");
        assert!(own.peak().unwrap() >= seen.rss_bytes / 2);
    }

    #[test]
    fn a_process_that_ended_is_not_there() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let process = Process::new(child.id());
        let begun = std::time::Instant::now();
        // It stays in the table, as a zombie, until it is waited for.
        while process.is_there() && begun.elapsed() < Duration::from_secs(10) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(!process.is_there());
        child.wait().unwrap();
        assert!(process.look().is_none());
    }
}
