//! System calls common to both drivers.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use super::driver::IoPart;
use crate::transport::{RawAddress, socklen};
pub(crate) use crate::transport::{check, owned};

/// The most pieces that the kernel takes in one operation (UIO_MAXIOV).
pub const MAX_PARTS: usize = 1024;

/// A descriptor without an operation keeps a list with room for this many pieces, but no longer one.
pub const FEW_PARTS: usize = 64;

/// How long a listener pauses after it hit the limit of descriptors or memory.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The eventfd that ends a `wait`.
pub struct Wake(OwnedFd);

impl Wake {
    pub fn new() -> io::Result<Self> {
        // SAFETY: takes no pointers; `owned` checks the new descriptor, which has no other owner.
        unsafe { owned(libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)) }.map(Wake)
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Flags that some calls take as signed numbers and others as unsigned ones.
#[expect(clippy::cast_sign_loss, reason = "a set of bits")]
pub const fn bits(flags: libc::c_int) -> u32 {
    flags as u32
}

/// Fills `iovecs` with the non-empty parts (at most MAX_PARTS) and returns their total size in bytes.
pub fn fill_iovecs(iovecs: &mut Vec<libc::iovec>, parts: &[IoPart]) -> io::Result<usize> {
    iovecs.clear();
    let wanted = parts.iter().filter(|part| part.len > 0).take(MAX_PARTS);
    iovecs.extend(wanted.map(|part| libc::iovec { iov_base: part.ptr.cast(), iov_len: part.len }));
    let total = iovecs.iter().try_fold(0usize, |sum, iovec| sum.checked_add(iovec.iov_len));
    match total {
        // A receive of no bytes would look like the end of the stream.
        Some(0) => Err(io::Error::new(io::ErrorKind::InvalidInput, "an operation on no bytes")),
        Some(total) if isize::try_from(total).is_ok() => Ok(total),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "the parts of an operation exceed the address space")),
    }
}

/// Releases a long list after its operation.
pub fn slim(iovecs: &mut Vec<libc::iovec>) {
    if iovecs.capacity() > FEW_PARTS {
        *iovecs = Vec::new();
    }
}

/// Checks the parts of an operation.
pub fn check_parts(parts: &[IoPart]) -> io::Result<()> {
    fill_iovecs(&mut Vec::new(), parts).map(drop)
}

/// # Safety
/// Every iovec points at memory that is writable during the call.
pub unsafe fn recv(fd: RawFd, iovecs: &mut [libc::iovec]) -> io::Result<usize> {
    retry(|| {
        if let [single] = iovecs {
            // SAFETY: the caller guarantees that the memory is writable.
            unsafe { libc::recv(fd, single.iov_base, single.iov_len, libc::MSG_DONTWAIT) }
        } else {
            let mut header = message(iovecs);
            // SAFETY: the caller guarantees that the memory is writable; the header outlives the call.
            unsafe { libc::recvmsg(fd, &mut header, libc::MSG_DONTWAIT) }
        }
    })
}

/// # Safety
/// Every iovec points at memory that is readable during the call.
pub unsafe fn send(fd: RawFd, iovecs: &mut [libc::iovec]) -> io::Result<usize> {
    const FLAGS: libc::c_int = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
    retry(|| {
        if let [single] = iovecs {
            // SAFETY: the caller guarantees that the memory is readable.
            unsafe { libc::send(fd, single.iov_base, single.iov_len, FLAGS) }
        } else {
            let header = message(iovecs);
            // SAFETY: the caller guarantees that the memory is readable; the header outlives the call.
            unsafe { libc::sendmsg(fd, &header, FLAGS) }
        }
    })
}

/// A message header that points at `iovecs` and must not outlive them.
pub fn message(iovecs: &mut [libc::iovec]) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr: no name, no parts, no control data.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = iovecs.as_mut_ptr();
    header.msg_iovlen = iovecs.len();
    header
}

pub fn connect(fd: RawFd, address: &RawAddress) -> io::Result<()> {
    // SAFETY: pointer and length describe the address, which outlives the call.
    check(unsafe { libc::connect(fd, address.as_ptr(), address.size()) })
}

/// The error that the descriptor's last asynchronous operation left.
pub fn take_error(fd: RawFd) -> io::Result<()> {
    let mut code: libc::c_int = 0;
    let mut len = socklen::<libc::c_int>();
    // SAFETY: `code` has `len` bytes.
    check(unsafe { libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_ERROR, (&raw mut code).cast(), &mut len) })?;
    if code == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(code)) }
}

pub fn shutdown(fd: RawFd) {
    // SAFETY: takes no pointers. Fails harmlessly if there is no connection.
    unsafe { libc::shutdown(fd, libc::SHUT_RDWR) };
}

pub fn shutdown_write(fd: RawFd) {
    // SAFETY: as above.
    unsafe { libc::shutdown(fd, libc::SHUT_WR) };
}

/// The connection ended, or its handshake failed, before `accept`: the next one may be fine.
pub fn is_lost_before_accept(error: &io::Error) -> bool {
    const LOST: [libc::c_int; 10] = [
        libc::ECONNABORTED,
        libc::EINTR,
        libc::EPROTO,
        libc::ENETDOWN,
        libc::ENOPROTOOPT,
        libc::EHOSTDOWN,
        libc::ENONET,
        libc::EHOSTUNREACH,
        libc::ENETUNREACH,
        libc::EPERM,
    ];
    error.raw_os_error().is_some_and(|code| LOST.contains(&code))
}

/// A duration that does not fit becomes the longest: 292 billion years.
pub fn timespec(duration: Duration) -> libc::timespec {
    let seconds = duration.as_secs().try_into().unwrap_or(libc::time_t::MAX);
    libc::timespec { tv_sec: seconds, tv_nsec: duration.subsec_nanos().into() }
}

/// Rounds up; otherwise a wait for a timer would spin through its last millisecond. A duration that does not fit
/// becomes the longest, 24 days: a wait may end early.
pub fn milliseconds_up(duration: Duration) -> libc::c_int {
    duration.as_nanos().div_ceil(1_000_000).try_into().unwrap_or(libc::c_int::MAX)
}

pub fn stale_token() -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, "the token names no open descriptor of this driver")
}

pub fn already(operation: &str) -> io::Error {
    io::Error::new(io::ErrorKind::AlreadyExists, format!("another {operation} of this descriptor is in flight"))
}

pub fn busy() -> io::Error {
    io::Error::new(io::ErrorKind::ResourceBusy, "operations of this descriptor are in flight")
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match usize::try_from(call()) {
            Ok(moved) => return Ok(moved),
            Err(_) => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn iovecs_skip_empty_parts_and_stop_at_the_kernels_limit() {
        let mut byte = 0u8;
        let ptr = &raw mut byte;
        let part = |len| IoPart { ptr, len };
        let mut iovecs = Vec::new();
        assert_eq!(fill_iovecs(&mut iovecs, &[part(0), part(1), part(0)]).unwrap(), 1);
        assert_eq!(iovecs.len(), 1);
        let mut many = vec![part(1); MAX_PARTS + 7];
        many[0].len = 0;
        assert_eq!(fill_iovecs(&mut iovecs, &many).unwrap(), MAX_PARTS);
    }

    #[test]
    fn iovecs_of_nothing_or_of_too_much_are_refused() {
        let part = |len| IoPart { ptr: std::ptr::null_mut(), len };
        let mut iovecs = Vec::new();
        assert!(fill_iovecs(&mut iovecs, &[]).is_err());
        assert!(fill_iovecs(&mut iovecs, &[part(0)]).is_err());
        assert!(fill_iovecs(&mut iovecs, &[part(usize::MAX), part(usize::MAX)]).is_err());
        assert!(fill_iovecs(&mut iovecs, &[part(usize::MAX)]).is_err());
    }

    #[test]
    fn waits_round_up_to_milliseconds() {
        assert_eq!(milliseconds_up(Duration::ZERO), 0);
        assert_eq!(milliseconds_up(Duration::from_nanos(1)), 1);
        assert_eq!(milliseconds_up(Duration::from_millis(7)), 7);
        assert_eq!(milliseconds_up(Duration::MAX), libc::c_int::MAX);
    }
}
