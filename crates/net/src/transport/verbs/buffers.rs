//! Message buffers of one connection: one piece of registered memory, cut into slots.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;

use super::abi::ACCESS_LOCAL_WRITE;
use super::error::VerbsError;
use super::queue::{Domain, Region};

const PAGE: usize = 4096;

/// Slots of equal size, by number.
pub struct Slots {
    /// Before the memory: dropped first.
    region: Region,
    memory: Pages,
    slot_bytes: usize,
    count: usize,
}

impl Slots {
    pub fn new(domain: &Rc<Domain>, count: usize, slot_bytes: usize) -> Result<Self, VerbsError> {
        let no_memory = || VerbsError::Peer("its buffers do not fit into memory");
        let memory = Pages::new(count.checked_mul(slot_bytes).ok_or_else(no_memory)?)
            .ok_or_else(|| VerbsError::Post { what: "buffers", source: io::ErrorKind::OutOfMemory.into() })?;
        // SAFETY: the memory is freed after the region is dropped (field order).
        let region = unsafe { Region::new(domain, memory.start.as_ptr(), memory.layout.size(), ACCESS_LOCAL_WRITE)? };
        Ok(Slots { region, memory, slot_bytes, count })
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn key(&self) -> u32 {
        self.region.local_key()
    }

    /// Where a slot lies. Panics for a slot that does not exist: numbers come from this process only.
    pub fn pointer(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.count, "slot {slot} of {}", self.count);
        // SAFETY: inside the allocation (checked above).
        unsafe { self.memory.start.as_ptr().add(slot * self.slot_bytes) }
    }

    /// The first bytes of a slot.
    ///
    /// # Safety
    /// The device does not write to the slot meanwhile, and nobody has a mutable view of it.
    pub unsafe fn bytes(&self, slot: usize, len: usize) -> &[u8] {
        // SAFETY: initialised (zeroed at first); for the rest, the caller's promise.
        unsafe { std::slice::from_raw_parts(self.pointer(slot), len.min(self.slot_bytes)) }
    }

    /// # Safety
    /// The device does not touch the slot meanwhile, and nobody else has a view of it.
    #[expect(clippy::mut_from_ref, reason = "slots are handed out one by one; the caller's promise")]
    pub unsafe fn bytes_mut(&self, slot: usize) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(slot), self.slot_bytes) }
    }
}

/// Whole pages of its own, so that a forked child's copy of them is nobody else's matter.
struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

impl Pages {
    fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.max(1).checked_next_multiple_of(PAGE)?, PAGE).ok()?;
        // SAFETY: the layout has a size above 0.
        NonNull::new(unsafe { alloc_zeroed(layout) }).map(|start| Pages { start, layout })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
