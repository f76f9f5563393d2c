//! Which peers can be reached without a network.
//!
//! Equal strings mean the same place; compare them, do not parse them. `None` (no /proc, as in some sandboxes): TCP is
//! the only option.

use std::os::unix::fs::MetadataExt;

/// Identifies where our abstract unix sockets can be reached: the same boot of the same kernel, and the same network
/// namespace.
///
/// A boot id is random and new for each boot; within it, device and inode identify a namespace. (Clones of a running
/// virtual machine share both. Connection attempts between them are refused, because socket names are random too.)
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
        // Works only if we may create namespaces (root, or unprivileged user namespaces); elsewhere only the first
        // check applies.
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
