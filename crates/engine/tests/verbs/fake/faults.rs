//! Faults that a device injects.

use std::collections::HashMap;
use std::net::Ipv6Addr;
use std::sync::Mutex;
use std::sync::atomic::AtomicI64;

pub struct Spec {
    pub down: bool,
    pub no_gid: bool,
    pub unreachable: bool,
    pub memlock: bool,
    pub mtu: i32,
    /// Requests that a queue takes.
    pub queue: i32,
    pub gid: [u8; 16],
    plans: Vec<Plan>,
    wants: HashMap<String, i64>,
    counts: Mutex<HashMap<String, u64>>,
    /// The number of live objects.
    pub alive: AtomicI64,
    /// Registrations by key: address, length, access.
    pub registered: Mutex<HashMap<u32, (u64, u64, i32)>>,
}

struct Plan {
    what: String,
    at: u64,
    and_later: bool,
    value: i32,
}

impl Spec {
    pub fn parse(text: &str) -> Spec {
        let gid: Ipv6Addr = "::ffff:10.77.0.1".parse().unwrap();
        let mut spec = Spec {
            down: false,
            no_gid: false,
            unreachable: false,
            memlock: false,
            mtu: 3,
            queue: 512,
            gid: gid.octets(),
            plans: Vec::new(),
            wants: HashMap::new(),
            counts: Mutex::default(),
            alive: AtomicI64::new(0),
            registered: Mutex::default(),
        };
        for word in text.split(',').filter(|word| !word.is_empty()) {
            let (name, value) = word.split_once('=').unwrap_or((word, "0"));
            match name {
                "down" => spec.down = true,
                "nogid" => spec.no_gid = true,
                "unreachable" => spec.unreachable = true,
                want if want.starts_with("want-") => {
                    spec.wants.insert(want.to_owned(), value.parse().unwrap());
                }
                "memlock" => spec.memlock = true,
                "queue" => spec.queue = value.parse().unwrap(),
                "mtu" => spec.mtu = value.parse().unwrap(),
                "gid" => spec.gid = value.parse::<Ipv6Addr>().unwrap().octets(),
                _ => {
                    let (what, at) = name.split_once('@').unwrap_or_else(|| panic!("fake libibverbs: what is {word}?"));
                    let and_later = at.ends_with('+');
                    let at = at.trim_end_matches('+').parse().unwrap();
                    spec.plans.push(Plan { what: what.into(), at, and_later, value: value.parse().unwrap() });
                }
            }
        }
        spec
    }

    /// True if the attribute has the wanted value, or any value is accepted.
    pub fn is_wanted(&self, name: &str, value: impl Into<i64>) -> bool {
        self.wants.get(name).is_none_or(|wanted| *wanted == value.into())
    }

    /// True if `bytes` more may be pinned.
    pub fn may_pin(&self, bytes: u64) -> bool {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        let known = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } == 0;
        let pinned: u64 = self.registered.lock().unwrap().values().map(|(_, len, _)| len).sum();
        !self.memlock || !known || pinned + bytes <= limit.rlim_cur
    }

    /// Counts an event; returns the error if it fails this time.
    pub fn hit(&self, what: &str) -> Option<i32> {
        if !self.plans.iter().any(|plan| plan.what == what) {
            return None;
        }
        let mut counts = self.counts.lock().unwrap();
        let count = counts.entry(what.to_owned()).or_default();
        *count += 1;
        let plan = self.plans.iter().find(|p| p.what == what && (p.at == *count || p.and_later && p.at < *count))?;
        Some(plan.value)
    }
}
