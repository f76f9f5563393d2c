//! The CPUs that this process may use, and how much CPU time.
//!
//! The affinity mask lists the CPUs; the kernel keeps it inside the cgroup's cpuset. CPU time can be limited further: a
//! container's quota is a bandwidth that no mask shows, so it is read from the cgroup (version 2 or 1), where the
//! tightest limit on the path to the root applies.

use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::path::{Path, PathBuf};

use super::sys::check;

/// Detected once, before any thread is pinned: a pinned thread sees only its own CPU.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    cpus: Vec<usize>,
    quota: Option<f64>,
}

impl Topology {
    pub fn detect() -> io::Result<Self> {
        let read = |path: &Path| std::fs::read_to_string(path).ok();
        Ok(Topology { cpus: allowed_cpus()?, quota: quota(&read) })
    }

    /// CPUs that this process may run on, ascending; at least one.
    pub fn cpus(&self) -> &[usize] {
        &self.cpus
    }

    /// The container's CPU time limit in CPUs, if there is one.
    pub fn quota(&self) -> Option<f64> {
        self.quota
    }

    /// The number of threads that can really run at once: the allowed CPUs, or the quota (rounded up) if that is lower.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "rounds to the nearest usize, and the allowed CPUs are fewer"
    )]
    pub fn cores(&self) -> usize {
        let by_quota = self.quota.map_or(usize::MAX, |quota| quota.ceil() as usize);
        self.cpus.len().min(by_quota).max(1)
    }

    /// The CPU for the `n`-th pinned thread: the `n`-th allowed one, wrapping around.
    pub fn cpu(&self, n: usize) -> usize {
        self.cpus[n % self.cpus.len()]
    }

    /// Like `cpu(n)`, but skips CPUs claimed by other processes: otherwise all tasks of one host would begin with the
    /// first. The claim holds until it is dropped or the process ends. If all CPUs are taken, or claims cannot be made,
    /// returns `cpu(n)`. `names`: the beginning of the claims' names.
    fn claim(&self, n: usize, names: &str) -> (usize, Option<Claim>) {
        let free = (n..n + self.cpus.len()).map(|n| self.cpu(n)).find_map(|cpu| Some((cpu, Claim::new(names, cpu)?)));
        free.map_or((self.cpu(n), None), |(cpu, claim)| (cpu, Some(claim)))
    }

    /// Pins the calling thread to `cpu(n)` and returns that CPU.
    pub fn pin_current_thread(&self, n: usize) -> io::Result<usize> {
        let cpu = self.cpu(n);
        confine_current_thread(&[cpu])?;
        Ok(cpu)
    }

    /// The same with a CPU that no other process has claimed, if there is one; the caller holds the claim.
    pub fn pin_current_thread_apart(&self, n: usize) -> io::Result<Option<Claim>> {
        let (cpu, claim) = self.claim(n, "starwire-cpu");
        confine_current_thread(&[cpu])?;
        Ok(claim)
    }

    /// Lets the calling thread run on every allowed CPU again: threads inherit the pinning of the thread that starts
    /// them.
    pub fn unpin_current_thread(&self) -> io::Result<()> {
        confine_current_thread(&self.cpus)
    }
}

/// An abstract unix socket named after a CPU: only one process of a network namespace can bind it, and the kernel
/// releases it when that process ends, however it ends.
pub struct Claim(#[allow(dead_code, reason = "held, not used")] UnixDatagram);

impl Claim {
    fn new(names: &str, cpu: usize) -> Option<Self> {
        let address = SocketAddr::from_abstract_name(format!("{names}-{cpu}")).ok()?;
        UnixDatagram::bind_addr(&address).ok().map(Self)
    }
}

fn confine_current_thread(cpus: &[usize]) -> io::Result<()> {
    const BITS: usize = usize::BITS as usize;
    let mut mask = vec![0usize; cpus.iter().max().map_or(1, |last| last / BITS + 1)];
    for cpu in cpus {
        mask[cpu / BITS] |= 1 << (cpu % BITS);
    }
    // SAFETY: the mask has the given number of bytes; the kernel accepts any length (missing bits are zero).
    check(unsafe { libc::sched_setaffinity(0, size_of_val(&mask[..]), mask.as_ptr().cast()) })
}

/// The kernel's affinity mask; grows the buffer until it holds every CPU of the machine.
fn allowed_cpus() -> io::Result<Vec<usize>> {
    const BITS: usize = usize::BITS as usize;
    let mut mask = vec![0usize; 1024 / BITS];
    loop {
        // SAFETY: the mask has the given number of bytes, a multiple of the word size as the kernel requires.
        let result = unsafe { libc::sched_getaffinity(0, size_of_val(&mask[..]), mask.as_mut_ptr().cast()) };
        if result >= 0 {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::InvalidInput || mask.len() * BITS > 1 << 20 {
            return Err(error);
        }
        mask = vec![0; mask.len() * 2];
    }
    let set = |cpu: &usize| mask[cpu / BITS] >> (cpu % BITS) & 1 == 1;
    let cpus: Vec<usize> = (0..mask.len() * BITS).filter(set).collect();
    if cpus.is_empty() {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the kernel allows this process no CPU"));
    }
    Ok(cpus)
}

fn quota(read: &dyn Fn(&Path) -> Option<String>) -> Option<f64> {
    let groups = read(Path::new("/proc/self/cgroup"))?;
    let mounts = read(Path::new("/proc/self/mountinfo"))?;
    let mut tightest: Option<f64> = None;
    for group in groups.lines() {
        let mut fields = group.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else { continue };
        let unified = controllers.is_empty();
        if !unified && !controllers.split(',').any(|controller| controller == "cpu") {
            continue;
        }
        let Some((directory, floor)) = directory_of(&mounts, unified, path) else { continue };
        // A limit on any ancestor applies too, as far up as this namespace can see.
        for level in directory.ancestors().take_while(|level| level.starts_with(&floor)) {
            let limit = if unified { limit_v2(read, level) } else { limit_v1(read, level) };
            if let Some(limit) = limit {
                tightest = Some(tightest.map_or(limit, |tightest| tightest.min(limit)));
            }
        }
    }
    tightest
}

/// The group's directory, and the mount point above which nothing is visible.
fn directory_of(mounts: &str, unified: bool, path: &str) -> Option<(PathBuf, PathBuf)> {
    for mount in mounts.lines() {
        // id parent major:minor root point options [optional …] - type source superoptions
        let (left, right) = mount.split_once(" - ")?;
        let mut left = left.split(' ').skip(3);
        let (Some(root), Some(point)) = (left.next(), left.next()) else { continue };
        let mut right = right.split(' ');
        let (kind, _source, options) = (right.next(), right.next(), right.next().unwrap_or(""));
        let fits = match unified {
            true => kind == Some("cgroup2"),
            false => kind == Some("cgroup") && options.split(',').any(|option| option == "cpu"),
        };
        if !fits {
            continue;
        }
        let point = PathBuf::from(point);
        // A container often sees only its own group, mounted as the root; then the path is the host's and does not
        // exist here.
        let below = Path::new(path).strip_prefix(root).unwrap_or(Path::new(""));
        let climbs = below.components().any(|part| !matches!(part, std::path::Component::Normal(_)));
        return Some((if climbs { point.clone() } else { point.join(below) }, point));
    }
    None
}

fn limit_v2(read: &dyn Fn(&Path) -> Option<String>, group: &Path) -> Option<f64> {
    let text = read(&group.join("cpu.max"))?;
    let (quota, period) = text.trim().split_once(' ')?;
    ratio(quota, period)
}

fn limit_v1(read: &dyn Fn(&Path) -> Option<String>, group: &Path) -> Option<f64> {
    let quota = read(&group.join("cpu.cfs_quota_us"))?;
    let period = read(&group.join("cpu.cfs_period_us"))?;
    ratio(quota.trim(), period.trim())
}

/// "max" and "-1" mean no limit.
fn ratio(quota: &str, period: &str) -> Option<f64> {
    let (quota, period) = (quota.parse::<u64>().ok()?, period.parse::<u64>().ok()?);
    (quota > 0 && period > 0).then(|| quota as f64 / period as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    fn quota_of(files: &[(&str, &str)]) -> Option<f64> {
        let files: HashMap<PathBuf, String> =
            files.iter().map(|(path, text)| (PathBuf::from(path), (*text).to_owned())).collect();
        quota(&|path| files.get(path).cloned())
    }

    const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";

    #[test]
    fn version_2_takes_the_tightest_limit_on_the_way_up() {
        let base = [("/proc/self/cgroup", "0::/pod/container\n"), ("/proc/self/mountinfo", V2)];
        let with = |more: &[(&'static str, &'static str)]| quota_of(&[&base[..], more].concat());
        assert_eq!(with(&[]), None);
        assert_eq!(with(&[("/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n")]), None);
        assert_eq!(with(&[("/sys/fs/cgroup/pod/container/cpu.max", "150000 100000\n")]), Some(1.5));
        let both = [
            ("/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n"),
            ("/sys/fs/cgroup/pod/cpu.max", "200000 100000\n"),
        ];
        assert_eq!(with(&both), Some(2.0));
    }

    #[test]
    fn version_1_is_found_by_its_controller() {
        let files = [
            ("/proc/self/cgroup", "4:memory:/x\n3:cpu,cpuacct:/docker/abc\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "29 23 0:25 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                 31 23 0:27 /docker/abc /sys/fs/cgroup/cpu,cpuacct rw master:12 - cgroup cgroup rw,cpu,cpuacct\n",
            ),
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "50000\n"),
            ("/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
        ];
        assert_eq!(quota_of(&files), Some(0.5));
        let mut unlimited = files;
        unlimited[2].1 = "-1\n";
        assert_eq!(quota_of(&unlimited), None);
    }

    #[test]
    fn a_host_path_resolves_to_the_containers_root() {
        for path in ["0::/../../other\n", "0::/host/path\n"] {
            let files = [
                ("/proc/self/cgroup", path),
                ("/proc/self/mountinfo", "30 23 0:26 /elsewhere /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"),
                ("/sys/fs/cgroup/cpu.max", "300000 100000\n"),
            ];
            assert_eq!(quota_of(&files), Some(3.0));
        }
    }

    #[test]
    fn nonsense_is_no_limit() {
        for text in ["", "max", "0 0", "1 0", "-5 100", "many few"] {
            let files =
                [("/proc/self/cgroup", "0::/\n"), ("/proc/self/mountinfo", V2), ("/sys/fs/cgroup/cpu.max", text)];
            assert_eq!(quota_of(&files), None);
        }
        assert_eq!(quota_of(&[("/proc/self/cgroup", "0::/\n"), ("/proc/self/mountinfo", "broken\n")]), None);
        assert_eq!(quota_of(&[]), None);
    }

    #[test]
    fn cores_are_what_can_run_at_once() {
        let topology = |cpus: &[usize], quota| Topology { cpus: cpus.to_vec(), quota };
        assert_eq!(topology(&[0, 1, 2, 3], None).cores(), 4);
        assert_eq!(topology(&[0, 1, 2, 3], Some(1.5)).cores(), 2);
        assert_eq!(topology(&[0], Some(64.0)).cores(), 1);
        assert_eq!(topology(&[0], Some(0.1)).cores(), 1);
        let gaps = topology(&[3, 9], None);
        assert_eq!((gaps.cpu(0), gaps.cpu(1), gaps.cpu(2)), (3, 9, 3));
    }

    #[test]
    fn each_cpu_is_claimed_once_until_it_is_given_back() {
        let topology = Topology { cpus: vec![3, 5, 9], quota: None };
        let names = format!("starwire-test-{}", std::process::id());
        let (first, claim) = topology.claim(0, &names);
        let (second, _kept) = topology.claim(0, &names);
        let (third, _kept_too) = topology.claim(2, &names);
        assert_eq!((first, second, third), (3, 5, 9));
        let (shared, none) = topology.claim(1, &names);
        assert!(shared == 5 && none.is_none());
        drop(claim);
        assert_eq!(topology.claim(1, &names).0, 3);
    }

    #[test]
    fn a_thread_can_be_pinned_to_every_allowed_cpu_of_this_machine() {
        let topology = Topology::detect().unwrap();
        assert!(!topology.cpus().is_empty() && topology.cores() >= 1);
        for n in 0..topology.cpus().len() {
            let topology = topology.clone();
            std::thread::spawn(move || {
                let cpu = topology.pin_current_thread(n).unwrap();
                assert_eq!(allowed_cpus().unwrap(), [cpu]);
                // Its children inherit the pinning until they unpin themselves.
                let child = std::thread::spawn(move || {
                    assert_eq!(allowed_cpus().unwrap(), [cpu]);
                    topology.unpin_current_thread().unwrap();
                    assert_eq!(allowed_cpus().unwrap(), topology.cpus());
                });
                child.join().unwrap();
            })
            .join()
            .unwrap();
        }
    }
}
