//! Permanent memory: one range of addresses for the life of the process, from which tensors that may travel are
//! allocated.
//!
//! Its allocator (in TensorFlow's process `cc/tensor/arena_allocator.cc`) may reuse pieces, but nothing ever unmaps or
//! discards a page. That makes it safe to keep registrations: a registered page always remains the page that the
//! process sees at that address.

use std::io;
use std::ptr;
use std::sync::OnceLock;

use super::error::VerbsError;

pub(super) const PAGE: usize = 4096;

/// A range of addresses, mapped and never unmapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arena {
    start: usize,
    len: usize,
}

static ARENA: OnceLock<Arena> = OnceLock::new();

impl Arena {
    /// The arena of this process; reserves `bytes` bytes (rounded up to whole pages) if there is none. Memory is used
    /// only for pages that are written to.
    pub fn reserve(bytes: u64) -> Result<Arena, VerbsError> {
        if let Some(arena) = ARENA.get() {
            return Ok(*arena);
        }
        let made = Self::map(bytes)?;
        let arena = *ARENA.get_or_init(|| made);
        if arena != made {
            // Another thread was faster.
            // SAFETY: this thread has just mapped the range, and no reference to it exists.
            unsafe { libc::munmap(made.start as *mut _, made.len) };
        }
        Ok(arena)
    }

    /// The size of the machine's memory; 0 if the system does not tell it.
    pub fn default_bytes() -> u64 {
        // SAFETY: sysconf takes no pointers.
        let pages = unsafe { libc::sysconf(libc::_SC_PHYS_PAGES) };
        // SAFETY: as above.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        pages.max(0).unsigned_abs().saturating_mul(page.max(0).unsigned_abs())
    }

    fn map(bytes: u64) -> Result<Arena, VerbsError> {
        let lacks = |source| VerbsError::Arena { mib: bytes >> 20, source };
        let len = usize::try_from(bytes).ok().and_then(|bytes| bytes.max(1).checked_next_multiple_of(PAGE));
        let len = len.ok_or_else(|| lacks(io::ErrorKind::OutOfMemory.into()))?;
        let (access, kind) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE);
        // SAFETY: an anonymous mapping at an address that the kernel chooses affects no existing memory.
        let start = unsafe { libc::mmap(ptr::null_mut(), len, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(lacks(io::Error::last_os_error()));
        }
        Ok(Arena { start: start as usize, len })
    }

    /// The whole pages that hold these bytes, if they are in the arena.
    pub fn pages(ptr: *const u8, len: usize) -> Option<(usize, usize)> {
        let arena = ARENA.get()?;
        let from = ptr as usize;
        let to = from.checked_add(len)?;
        if from < arena.start || to > arena.start + arena.len {
            return None;
        }
        let first = from & !(PAGE - 1);
        Some((first, to.next_multiple_of(PAGE) - first))
    }

    pub fn start(&self) -> *mut u8 {
        self.start as *mut u8
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_of_the_arena_has_pages() {
        let arena = Arena::reserve(1 << 20).unwrap();
        assert_eq!(Arena::reserve(1).unwrap(), arena, "there is one");
        let at = arena.start();
        let base = at as usize;
        assert_eq!(Arena::pages(at, 1), Some((base, PAGE)));
        assert_eq!(Arena::pages(at.wrapping_add(PAGE - 1), 2), Some((base, 2 * PAGE)));
        assert_eq!(Arena::pages(at.wrapping_add(arena.len() - 8), 8), Some((base + arena.len() - PAGE, PAGE)));
        assert_eq!(Arena::pages(at.wrapping_add(arena.len() - 8), 9), None);
        assert_eq!(Arena::pages(at.wrapping_sub(1), 2), None);
        assert_eq!(Arena::pages(at, usize::MAX), None);
        assert_eq!(Arena::pages(b"elsewhere".as_ptr(), 9), None);
    }

    #[test]
    fn more_than_there_are_addresses_is_an_error() {
        let error = Arena::map(1 << 60).unwrap_err().to_string();
        assert!(error.contains("STARWIRE_VERBS_ARENA"), "{error}");
        assert!(Arena::map(u64::MAX).is_err());
    }
}
