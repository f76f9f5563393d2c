//! Registered memory of one connection: for one transfer, or, if the memory is permanent, for the life of the
//! connection.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::abi::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ};
use super::arena::Arena;
use super::error::VerbsError;
use super::queue::{Domain, Region};
use super::stats::VerbsStats;

/// The most registrations that a connection keeps; beyond that, the least recently used are evicted.
const MOST_KEPT: usize = 4096;

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Purpose {
    /// Our device writes to it.
    Fill,
    /// The peer's device reads it.
    Offer,
}

/// Keeps a piece of memory registered while it exists.
pub type Lease = Rc<Region>;

struct Kept {
    region: Lease,
    len: usize,
    last_used: u64,
}

pub struct Registrations {
    domain: Rc<Domain>,
    /// By purpose and first page; all of it lies in the arena.
    kept: BTreeMap<(Purpose, usize), Kept>,
    uses: u64,
}

impl Registrations {
    pub fn new(domain: &Rc<Domain>) -> Self {
        Self { domain: domain.clone(), kept: BTreeMap::new(), uses: 0 }
    }

    /// # Safety
    /// The memory is valid, and writable for `Fill`, until the lease is dropped. (Only the arena's memory, which is
    /// always valid, stays registered beyond that.)
    pub unsafe fn lease(
        &mut self,
        ptr: *mut u8,
        len: usize,
        purpose: Purpose,
        stats: &mut VerbsStats,
    ) -> Result<Lease, VerbsError> {
        self.uses += 1;
        let Some((first, bytes)) = Arena::pages(ptr, len) else {
            let access = match purpose {
                Purpose::Fill => ACCESS_LOCAL_WRITE,
                Purpose::Offer => ACCESS_REMOTE_READ,
            };
            stats.registrations += 1;
            // SAFETY: the caller guarantees validity until the lease, which owns the region, is dropped.
            return unsafe { self.register(ptr, len, access) }.map(Rc::new);
        };
        let uses = self.uses;
        let before = self.kept.range_mut((purpose, 0)..=(purpose, first)).next_back();
        if let Some(((_, start), kept)) = before {
            if *start + kept.len >= first + bytes {
                kept.last_used = uses;
                stats.registrations_reused += 1;
                return Ok(kept.region.clone());
            }
        }
        let access = match purpose {
            Purpose::Fill => ACCESS_LOCAL_WRITE,
            // Kernels that pin pages only for reading may pin one that the first write replaces.
            Purpose::Offer => ACCESS_LOCAL_WRITE | ACCESS_REMOTE_READ,
        };
        if self.kept.len() >= MOST_KEPT {
            self.forget(uses - MOST_KEPT as u64 / 2);
        }
        stats.registrations += 1;
        // SAFETY: the arena's pages are mapped, writable and never unmapped.
        let region = Rc::new(unsafe { self.register(first as *mut u8, bytes, access)? });
        self.kept.insert((purpose, first), Kept { region: region.clone(), len: bytes, last_used: uses });
        Ok(region)
    }

    /// # Safety
    /// As for `Region::new`.
    unsafe fn register(&mut self, ptr: *mut u8, len: usize, access: i32) -> Result<Region, VerbsError> {
        // SAFETY: the caller upholds the contract of `Region::new`.
        let mut region = unsafe { Region::new(&self.domain, ptr, len, access) };
        if region.is_err() && self.forget(u64::MAX) {
            // The registrations kept for later may be using up the limit.
            // SAFETY: as above.
            region = unsafe { Region::new(&self.domain, ptr, len, access) };
        }
        region.inspect_err(|_| self.domain.device.shortages.report())
    }

    /// Releases the registrations kept for later, because another connection is short of memory. True: there were some.
    pub fn make_room(&mut self) -> bool {
        self.forget(u64::MAX)
    }

    /// Drops registrations that are not in use and were last used before `since`. True: there were some.
    fn forget(&mut self, since: u64) -> bool {
        let before = self.kept.len();
        self.kept.retain(|_, kept| kept.last_used >= since || Rc::strong_count(&kept.region) > 1);
        self.kept.len() < before
    }
}
