//! Memory for the payloads of incoming calls, outside the heap.
//!
//! Blocks of some hundred kilobytes that come and go among small long-lived ones fragment a C library's heap: many
//! connections leave behind many times what they hold. So these blocks are mapped separately; a few are kept for the
//! next calls, and the rest is returned to the system.

use std::io;
use std::ptr::{self, NonNull};
use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crossbeam_queue::ArrayQueue;

/// Shorter payloads come from the heap …
pub const MIN: usize = 64 << 10;
/// … and longer ones, too, which C libraries map separately.
pub const MAX: usize = 32 << 20;
/// Most bytes kept for the next calls.
const KEPT_BYTES: usize = 32 << 20;
/// Most pieces of one size that are kept.
const KEPT_PIECES: usize = 256;
/// Sizes per power of two: a piece wastes an eighth of its address space. It wastes no memory, since untouched pages
/// take none.
const STEPS: usize = 8;
const SIZES: usize = (MAX.ilog2() - MIN.ilog2()) as usize * STEPS + 1;

/// A mapped piece of memory of at least the requested length, with any content.
pub struct Slab {
    start: NonNull<u8>,
    size: usize,
}

// SAFETY: memory that nobody else knows; nothing of it is tied to a thread.
unsafe impl Send for Slab {}

/// Those that nobody uses.
struct Pool {
    by_size: [ArrayQueue<Slab>; SIZES],
    bytes: AtomicUsize,
}

static POOL: LazyLock<Pool> = LazyLock::new(Pool::new);

impl Pool {
    fn new() -> Self {
        Self { by_size: std::array::from_fn(|_| ArrayQueue::new(KEPT_PIECES)), bytes: AtomicUsize::new(0) }
    }

    fn take(&self, len: usize) -> io::Result<Slab> {
        let (index, size) = class(len).ok_or(io::ErrorKind::InvalidInput)?;
        if let Some(kept) = self.by_size[index].pop() {
            self.bytes.fetch_sub(size, Relaxed);
            return Ok(kept);
        }
        Slab::map(size)
    }

    fn give_back(&self, slab: Slab) {
        let Some((index, _)) = class(slab.size) else { return };
        let size = slab.size;
        // Counted before it can be taken, so that the sum never falls below zero.
        if self.bytes.fetch_add(size, Relaxed) + size > KEPT_BYTES || self.by_size[index].push(slab).is_err() {
            self.bytes.fetch_sub(size, Relaxed);
        }
    }
}

impl Slab {
    /// `len` is from MIN to MAX.
    pub fn take(len: usize) -> io::Result<Self> {
        POOL.take(len)
    }

    fn map(size: usize) -> io::Result<Self> {
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping, wherever the kernel has room.
        let start = unsafe { libc::mmap(ptr::null_mut(), size, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, size })
    }

    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Keeps it for the next call, or returns it to the system.
    pub fn give_back(self) {
        POOL.give_back(self);
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: mapped in `take` with this size, and whoever drops it has the only handle.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.size) };
    }
}

/// The size that a length is rounded up to, and its number.
fn class(len: usize) -> Option<(usize, usize)> {
    if !(MIN..=MAX).contains(&len) {
        return None;
    }
    let power = len.ilog2();
    let step = (1usize << power) / STEPS;
    let size = len.next_multiple_of(step);
    // One that was rounded up to the next power of two is that one's first.
    let power = size.ilog2();
    let index = (power - MIN.ilog2()) as usize * STEPS + (size - (1usize << power)) / ((1usize << power) / STEPS);
    Some((index, size))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_has_a_number_of_its_own() {
        assert_eq!(class(MIN - 1), None);
        assert_eq!(class(MAX + 1), None);
        assert_eq!(class(MIN), Some((0, MIN)));
        assert_eq!(class(MAX), Some((SIZES - 1, MAX)));
        let mut len = MIN;
        for index in 0..SIZES {
            let (found, size) = class(len).unwrap();
            assert_eq!(found, index);
            assert!(size >= len && size - len <= len / STEPS && size % 4096 == 0, "{len}: {size}");
            assert_eq!(class(size), Some((index, size)), "a size is its own");
            len = size + 1;
        }
    }

    #[test]
    fn what_is_given_back_is_taken_again_and_not_all_of_it_is_kept() {
        const LEN: usize = 7 << 20;
        let write = |slab: &Slab, byte: u8| {
            // SAFETY: the slab has at least LEN bytes and is this test's.
            unsafe { ptr::write_bytes(slab.start().as_ptr(), byte, LEN) };
        };
        let pool = Pool::new();
        let slab = pool.take(LEN).unwrap();
        write(&slab, 1);
        let at = slab.start();
        pool.give_back(slab);
        let again = pool.take(LEN).unwrap();
        assert_eq!(again.start(), at);
        let many: Vec<Slab> = (0..8).map(|_| pool.take(LEN).unwrap()).collect();
        many.iter().chain([&again]).for_each(|slab| write(slab, 2));
        many.into_iter().chain([again]).for_each(|slab| pool.give_back(slab));
        let (index, size) = class(LEN).unwrap();
        assert_eq!(pool.by_size[index].len(), KEPT_BYTES / size);
        assert_eq!(pool.bytes.load(Relaxed), KEPT_BYTES / size * size);
    }
}
