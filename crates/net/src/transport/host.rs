//! Who can be reached without a network.
//!
//! Equal texts mean the same place. They are to be compared, not parsed. `None` (no /proc, as in some sandboxes) means:
//! no other way than TCP.

use std::os::unix::fs::MetadataExt;

/// Where our abstract unix sockets can be reached from: the same boot of the same kernel, and the same network
/// namespace.
///
/// A boot id is random and fresh for each boot; within it, device and inode name a namespace. (Clones of a running
/// virtual machine share both. Between those a connection attempt is refused, because a socket's name is random too.)
pub fn identity() -> Option<String> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let boot = boot.trim();
    let plausible = !boot.is_empty() && boot.len() <= 64 && boot.bytes().all(|b| b.is_ascii_hexdigit() || b == b'-');
    let meta = std::fs::metadata("/proc/self/ns/net").ok()?;
    plausible.then(|| format!("{boot}-{:x}-{:x}", meta.dev(), meta.ino()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scope_is_stable_and_printable() {
        let scope = identity().unwrap();
        assert!(scope.bytes().all(|byte| byte.is_ascii_graphic()), "{scope}");
        assert_eq!(Some(scope), identity());
    }

    #[test]
    fn another_network_namespace_is_another_scope() {
        let own = std::fs::metadata("/proc/self/ns/net").unwrap();
        // Where we may make namespaces (root, or unprivileged user namespaces); elsewhere only the first test speaks.
        let output = std::process::Command::new("unshare")
            .args(["--user", "--net", "stat", "-L", "-c", "%i", "/proc/self/ns/net"])
            .output();
        match output {
            Ok(output) if output.status.success() => {
                assert_ne!(String::from_utf8_lossy(&output.stdout).trim(), own.ino().to_string());
            }
            _ => eprintln!("SKIPPED, NOT TESTED: no new network namespace can be made here"),
        }
    }
}
