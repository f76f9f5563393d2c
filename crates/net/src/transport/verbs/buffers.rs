//! Message buffers of one connection: one piece of registered memory, cut into slots.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::io;
use std::ptr::NonNull;
use std::rc::Rc;

use super::abi::ACCESS_LOCAL_WRITE;
use super::arena::PAGE;
use super::error::VerbsError;
use super::queue::{Domain, Region};

/// Slots of equal size, by number.
pub struct Slots {
    /// Declared before the memory, so that it is dropped first.
    region: Region,
    memory: Pages,
    slot_bytes: usize,
    count: usize,
}

impl Slots {
    pub fn new(domain: &Rc<Domain>, count: usize, slot_bytes: usize) -> Result<Self, VerbsError> {
        let no_memory = || VerbsError::Peer("its buffers exceed the address space");
        let memory = Pages::new(count.checked_mul(slot_bytes).ok_or_else(no_memory)?)
            .ok_or_else(|| VerbsError::Post { what: "buffers", source: io::ErrorKind::OutOfMemory.into() })?;
        // SAFETY: the memory is valid until it is freed, which is after the region is dropped (field order).
        let region = unsafe { Region::new(domain, memory.start.as_ptr(), memory.layout.size(), ACCESS_LOCAL_WRITE)? };
        Ok(Slots { region, memory, slot_bytes, count })
    }

    pub fn count(&self) -> usize {
        self.count
    }

    pub fn key(&self) -> u32 {
        self.region.local_key()
    }

    /// The address of a slot. Panics if the slot does not exist: slot numbers come from this process only.
    pub fn pointer(&self, slot: usize) -> *mut u8 {
        assert!(slot < self.count, "slot {slot} of {}", self.count);
        // SAFETY: inside the allocation (checked above).
        unsafe { self.memory.start.as_ptr().add(slot * self.slot_bytes) }
    }

    /// The first bytes of a slot.
    ///
    /// # Safety
    /// While the slice lives, the device does not write to the slot and no mutable view of it exists.
    pub unsafe fn bytes(&self, slot: usize, len: usize) -> &[u8] {
        // SAFETY: initialised (`alloc_zeroed`) and in bounds; the caller guarantees that there is no concurrent write.
        unsafe { std::slice::from_raw_parts(self.pointer(slot), len.min(self.slot_bytes)) }
    }

    /// # Safety
    /// While the slice lives, the device does not access the slot and no other view of it exists.
    #[expect(clippy::mut_from_ref, reason = "slots are handed out one by one; the caller's promise")]
    pub unsafe fn bytes_mut(&self, slot: usize) -> &mut [u8] {
        // SAFETY: initialised and in bounds; the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.pointer(slot), self.slot_bytes) }
    }
}

/// Whole pages, shared with no other data, so that fork affects nothing else.
struct Pages {
    start: NonNull<u8>,
    layout: Layout,
}

impl Pages {
    fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.max(1).checked_next_multiple_of(PAGE)?, PAGE).ok()?;
        // SAFETY: the layout's size is at least one page.
        NonNull::new(unsafe { alloc_zeroed(layout) }).map(|start| Pages { start, layout })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}
