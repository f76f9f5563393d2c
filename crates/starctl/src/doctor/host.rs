//! The machine: CPUs, limits, io_uring, kernel settings.

use std::fs;
use std::path::Path;

use starwire_net::reactor::topology::Topology;
use starwire_net::reactor::uring::UringDriver;

use super::Finding;

/// Below this many descriptors a large cluster runs into the limit: each peer takes one or two, TensorFlow's own gRPC
/// as many again.
const FEW_FILES: u64 = 4096;
/// Socket buffers below this limit a connection to about 2 MB per round trip.
const SMALL_BUFFER: u64 = 2 << 20;

pub fn examine() -> Vec<Finding> {
    let mut findings = vec![kernel(), cpus()];
    findings.extend(memory(Path::new("/sys/fs/cgroup")));
    findings.push(io_uring());
    findings.extend(limits(&fs::read_to_string("/proc/self/limits").unwrap_or_default()));
    findings.extend(sysctls(Path::new("/proc/sys")));
    findings
}

fn kernel() -> Finding {
    match fs::read_to_string("/proc/sys/kernel/osrelease") {
        Ok(release) => Finding::ok("kernel", release.trim()),
        Err(error) => Finding::note("kernel", format!("cannot read /proc ({error}); some checks are skipped")),
    }
}

fn cpus() -> Finding {
    const SUBJECT: &str = "CPUs";
    let topology = match Topology::detect() {
        Ok(topology) => topology,
        Err(error) => {
            return Finding::note(SUBJECT, format!("cannot read the CPUs that this process may use: {error}"));
        }
    };
    let list: Vec<String> = topology.cpus().iter().map(ToString::to_string).collect();
    let text = format!("{} usable (affinity and cpuset: {})", topology.cores(), list.join(","));
    match topology.quota() {
        Some(quota) => Finding::note(
            SUBJECT,
            format!(
                "{text}; the container's quota is {quota:.1}: polling reactors would use it up, leave *_ENABLE_POLLING off"
            ),
        ),
        None if topology.cores() == 1 => {
            Finding::note(SUBJECT, format!("{text}: TensorFlow and the reactor share it, leave *_ENABLE_POLLING off"))
        }
        None => Finding::ok(SUBJECT, text),
    }
}

fn memory(root: &Path) -> Option<Finding> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let path = own.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    let text =
        fs::read_to_string(root.join(path).join("memory.max")).or_else(|_| fs::read_to_string(root.join("memory.max")));
    let limit: u64 = text.ok()?.trim().parse().ok()?;
    Some(Finding::ok("memory limit", format!("{} MiB (cgroup)", limit >> 20)))
}

fn io_uring() -> Finding {
    const SUBJECT: &str = "io_uring";
    match UringDriver::new() {
        Ok(_) => Finding::ok(SUBJECT, "has all that STARWIRE_DRIVER=io_uring needs"),
        Err(error) => Finding::note(SUBJECT, format!("{error}; reactors use epoll")),
    }
}

fn limits(text: &str) -> Vec<Finding> {
    // The soft limit: a number, or "unlimited".
    let soft = |name: &str| {
        let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
        match rest.split_whitespace().next()? {
            "unlimited" => Some(u64::MAX),
            number => number.parse().ok(),
        }
    };
    let amount = |n: u64, unit: &str| if n == u64::MAX { "unlimited".to_owned() } else { format!("{n}{unit}") };
    let files = soft("Max open files").map(|files| {
        let note = format!("{files}: enough for a few hundred tasks; raise it with `ulimit -n` for more");
        Finding::ok_if(files >= FEW_FILES, "open files", amount(files, ""), note)
    });
    let locked = soft("Max locked memory").map(|bytes| {
        let text = amount(if bytes == u64::MAX { bytes } else { bytes >> 10 }, " KiB");
        let note = format!("{text}: io_uring on kernels before 5.12 may lack memory for its rings (`ulimit -l`)");
        Finding::ok_if(bytes >= 8 << 20, "locked memory", text, note)
    });
    files.into_iter().chain(locked).collect()
}

fn sysctls(root: &Path) -> Vec<Finding> {
    let read = |name: &str| fs::read_to_string(root.join(name.replace('.', "/"))).ok();
    let number = |name: &str| read(name)?.split_whitespace().last()?.parse::<u64>().ok();
    let mut findings = Vec::new();
    let mut check = |name: &str, unit: &str, is_ok: fn(u64) -> bool, why: &str| {
        if let Some(n) = number(name) {
            findings.push(Finding::ok_if(is_ok(n), name, format!("{n}{unit}"), format!("{n}{unit}: {why}")));
        }
    };
    let slow = "large tensors wait for round trips; 16 MiB suits fast networks";
    for name in ["net.ipv4.tcp_wmem", "net.ipv4.tcp_rmem"] {
        check(name, " bytes at most", |n| n >= SMALL_BUFFER, slow);
    }
    let why = "a thousand workers that start at once would have to retry";
    check("net.core.somaxconn", "", |n| n >= 1024, why);
    let why = "between hosts, each step after a pause starts slowly; set it to 0 for training";
    check("net.ipv4.tcp_slow_start_after_idle", "", |n| n != 1, why);
    if number("net.ipv6.conf.all.disable_ipv6").is_none_or(|off| off == 1) {
        findings.push(Finding::note("IPv6", "off: only IPv4 addresses can be used"));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::Verdict;
    use super::*;

    fn verdicts(findings: &[Finding]) -> Vec<(&str, Verdict)> {
        findings.iter().map(|f| (f.subject.as_str(), f.verdict)).collect()
    }

    #[test]
    fn limits_are_read_from_the_kernels_table() {
        let text = "Limit                     Soft Limit           Hard Limit           Units     \n\
                    Max open files            1024                 524288               files     \n\
                    Max locked memory         unlimited            unlimited            bytes     \n";
        let findings = limits(text);
        assert_eq!(verdicts(&findings), [("open files", Verdict::Note), ("locked memory", Verdict::Ok)]);
        assert!(findings[0].text.starts_with("1024: "));
        assert_eq!(findings[1].text, "unlimited");
        let findings =
            limits(&text.replace("unlimited            unl", "65536                unl").replace("1024 ", "8192 "));
        assert_eq!(verdicts(&findings), [("open files", Verdict::Ok), ("locked memory", Verdict::Note)]);
        assert!(limits("").is_empty());
    }

    #[test]
    fn kernel_settings_that_matter() {
        let root = std::env::temp_dir().join(format!("starctl-sysctl-{}", std::process::id()));
        let write = |name: &str, text: &str| {
            let path = root.join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("net/ipv4/tcp_wmem", "4096\t16384\t4194304\n");
        write("net/ipv4/tcp_rmem", "4096\t16384\t131072\n");
        write("net/core/somaxconn", "128\n");
        write("net/ipv4/tcp_slow_start_after_idle", "0\n");
        let findings = sysctls(&root);
        fs::remove_dir_all(&root).unwrap();
        assert_eq!(
            verdicts(&findings),
            [
                ("net.ipv4.tcp_wmem", Verdict::Ok),
                ("net.ipv4.tcp_rmem", Verdict::Note),
                ("net.core.somaxconn", Verdict::Note),
                ("net.ipv4.tcp_slow_start_after_idle", Verdict::Ok),
                ("IPv6", Verdict::Note),
            ]
        );
    }

    #[test]
    fn this_machine_can_be_examined() {
        let findings = examine();
        assert!(findings.iter().any(|f| f.subject == "CPUs"), "{findings:?}");
        assert!(findings.iter().all(|f| f.verdict != Verdict::Bad), "{findings:?}");
    }
}
