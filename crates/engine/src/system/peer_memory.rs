//! Copying from the memory of another process on this host: one copy, where a socket takes two.
//!
//! The kernel lets a process read the processes that it may debug: those of the same user in a visible PID namespace,
//! unless a security module (Yama's `ptrace_scope`) or a container's filter forbids it. So it is tried before it is
//! relied on.

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst, fence};
use std::sync::{Mutex, PoisonError};

use starwire_net::reactor::driver::IoPart;
use starwire_protocol::{Loan, Witness};

/// Most processes that are remembered.
const MOST_UNREADABLE: usize = 4096;

/// A process whose memory can be read.
#[derive(Clone, Copy, Debug)]
pub struct PeerMemory {
    pid: i32,
}

impl PeerMemory {
    /// The process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// None: it cannot be read. Finding out reads nothing.
    pub fn of(pid: i32) -> Option<Self> {
        let memory = PeerMemory { pid };
        let mut byte = [0u8];
        let to = libc::iovec { iov_base: byte.as_mut_ptr().cast(), iov_len: 1 };
        let nowhere = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 1 };
        // SAFETY: one byte may be written. No process has memory at 0, and who may not read is told so first.
        let refused =
            pid > 0 && unsafe { memory.read(&[to], &[nowhere]) }.is_err_and(|e| e.raw_os_error() == Some(libc::EFAULT));
        refused.then_some(memory)
    }

    /// Copies the next bytes of a loan into `to`, in order; a part without memory is skipped. Fails if the memory was
    /// not lent, or no longer is.
    ///
    /// # Safety
    /// The memory of every part with a pointer is writable.
    pub unsafe fn copy(&self, loan: &Loan, to: &[IoPart]) -> io::Result<()> {
        let (mut local, mut remote) = (Vec::with_capacity(to.len()), Vec::with_capacity(to.len() + loan.pieces.len()));
        let mut pieces = Cursor { pieces: &loan.pieces, offset: 0 };
        pieces.take(loan.taken, |_| {});
        for part in to {
            if part.ptr.is_null() {
                pieces.take(part.len as u64, |_| {});
            } else {
                local.push(libc::iovec { iov_base: part.ptr.cast(), iov_len: part.len });
                pieces.take(part.len as u64, |piece| remote.push(piece));
            }
        }
        let mut result = Ok(());
        while !local.is_empty() && result.is_ok() {
            // SAFETY: the caller's promise.
            match unsafe { self.read(&local, &remote) } {
                Ok(0) => result = Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    skip(&mut local, n);
                    skip(&mut remote, n);
                }
                Err(error) => result = Err(error),
            }
        }
        fence(SeqCst);
        if self.vouches(&loan.witness) { result } else { Err(io::Error::other("the peer has revoked the loan")) }
    }

    fn vouches(&self, witness: &Witness) -> bool {
        let mut value = 0u64;
        let word = libc::iovec { iov_base: (&raw mut value).cast(), iov_len: 8 };
        let at = libc::iovec { iov_base: pointer(witness.address), iov_len: 8 };
        // SAFETY: a word of ours.
        unsafe { self.read(&[word], &[at]) }.is_ok_and(|n| n == 8) && value == witness.value
    }

    /// # Safety
    /// The memory of the local pieces is writable.
    unsafe fn read(&self, local: &[libc::iovec], remote: &[libc::iovec]) -> io::Result<usize> {
        // SAFETY: the caller's promise; the other process is only read.
        let n = unsafe {
            let (pieces, there) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
            libc::process_vm_readv(self.pid, local.as_ptr(), pieces, remote.as_ptr(), there, 0)
        };
        usize::try_from(n).map_err(|_| io::Error::last_os_error())
    }
}

/// Walks through the pieces of a loan.
struct Cursor<'a> {
    pieces: &'a [(u64, u64)],
    offset: u64,
}

impl Cursor<'_> {
    fn take(&mut self, mut len: u64, mut give: impl FnMut(libc::iovec)) {
        while len != 0 {
            let Some((&(address, size), rest)) = self.pieces.split_first() else { return };
            let step = len.min(size - self.offset);
            give(libc::iovec { iov_base: pointer(address.wrapping_add(self.offset)), iov_len: in_memory(step) });
            len -= step;
            self.offset += step;
            if self.offset == size {
                (self.pieces, self.offset) = (rest, 0);
            }
        }
    }
}

/// An address in another process.
fn pointer(address: u64) -> *mut libc::c_void {
    std::ptr::without_provenance_mut(in_memory(address))
}

#[expect(clippy::cast_possible_truncation, reason = "a usize holds a u64 (lib.rs)")]
fn in_memory(n: u64) -> usize {
    n as usize
}

/// Drops the first `n` bytes.
fn skip(pieces: &mut Vec<libc::iovec>, mut n: usize) {
    let whole = pieces.iter().take_while(|piece| {
        let all = piece.iov_len <= n;
        n -= if all { piece.iov_len } else { 0 };
        all
    });
    let whole = whole.count();
    pieces.drain(..whole);
    if let Some(first) = pieces.first_mut() {
        first.iov_base = first.iov_base.wrapping_byte_add(n);
        first.iov_len -= n;
    }
}

/// The witness of everything lent on a connection. Dropped before any of that.
pub struct WitnessWord(Box<AtomicU64>);

impl WitnessWord {
    /// `random`: a value that other memory does not have by accident.
    pub fn new(random: u64) -> Self {
        WitnessWord(Box::new(AtomicU64::new(random | 1)))
    }

    pub fn witness(&self) -> Witness {
        Witness { address: (&raw const *self.0) as u64, value: self.0.load(SeqCst) }
    }
}

impl Drop for WitnessWord {
    fn drop(&mut self) {
        self.0.store(0, SeqCst);
        fence(SeqCst);
    }
}

/// Processes whose loans could not be read: nothing more is borrowed from them. Identified by the kernel, so that no
/// process can impersonate another.
#[derive(Default)]
pub struct Unreadable(Mutex<HashSet<i32>>);

impl Unreadable {
    pub fn contains(&self, pid: i32) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(&pid)
    }

    /// False: it was already there.
    pub fn insert(&self, pid: i32) -> bool {
        let mut pids = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if pids.len() >= MOST_UNREADABLE {
            pids.clear();
        }
        pids.insert(pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> PeerMemory {
        PeerMemory::of(std::process::id() as i32).expect("a process may read itself")
    }

    fn part(bytes: &mut [u8]) -> IoPart {
        IoPart { ptr: bytes.as_mut_ptr(), len: bytes.len() }
    }

    #[test]
    fn a_process_that_is_not_there_cannot_be_read() {
        assert!(PeerMemory::of(0).is_none());
        assert!(PeerMemory::of(-1).is_none());
        assert!(PeerMemory::of(i32::MAX).is_none());
    }

    #[test]
    fn pieces_are_copied_in_order_however_they_are_cut() {
        let source: Vec<u8> = (0..100_000u32).map(|i| (i * 7 % 251) as u8).collect();
        let word = WitnessWord::new(12345);
        let base = source.as_ptr() as u64;
        let pieces = vec![(base, 10), (base + 10, 49_990), (base + 50_000, 50_000)];
        for (taken, lens) in
            [(0u64, vec![100_000usize]), (3, vec![1, 6, 49_990, 2, 50_000 - 2]), (60_000, vec![40_000])]
        {
            let loan = Loan { witness: word.witness(), pieces: pieces.clone(), taken };
            let mut target = vec![0u8; lens.iter().sum()];
            let mut rest = &mut target[..];
            let mut parts = Vec::new();
            for len in lens {
                let (one, others) = rest.split_at_mut(len);
                parts.push(part(one));
                rest = others;
            }
            // SAFETY: the parts are of the target.
            unsafe { own().copy(&loan, &parts) }.unwrap();
            let from = taken as usize;
            assert!(target == source[from..from + target.len()]);
        }
        // Unwanted bytes are skipped.
        let loan = Loan { witness: word.witness(), pieces, taken: 0 };
        let mut end = [0u8; 5];
        let parts = [IoPart { ptr: std::ptr::null_mut(), len: 99_995 }, part(&mut end)];
        // SAFETY: as above.
        unsafe { own().copy(&loan, &parts) }.unwrap();
        assert_eq!(end[..], source[99_995..]);
    }

    #[test]
    fn what_was_taken_back_is_noticed() {
        let source = [7u8; 4096];
        let mut target = [0u8; 4096];
        let word = WitnessWord::new(99);
        let mut loan = Loan { witness: word.witness(), pieces: vec![(source.as_ptr() as u64, 4096)], taken: 0 };
        loan.witness.value += 2;
        // SAFETY: the part is of the target.
        let error = unsafe { own().copy(&loan, &[part(&mut target)]) }.unwrap_err();
        assert!(error.to_string().contains("revoked the loan"), "{error}");
        loan.witness = word.witness();
        loan.pieces[0].0 = 8;
        // SAFETY: as above.
        let error = unsafe { own().copy(&loan, &[part(&mut target)]) }.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EFAULT));
    }
}
