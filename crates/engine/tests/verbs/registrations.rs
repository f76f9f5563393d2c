//! Lifetime and rights of memory registrations.

#![allow(clippy::undocumented_unsafe_blocks, reason = "memory outlives the operations, which every test waits for")]

use starwire_net::reactor::driver::IoPart;
use starwire_net::transport::verbs::Arena;
use starwire_net::transport::verbs::abi::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_READ};

use super::pair::{Pair, bytes};
use crate::harness::fake_library::{self, covers};

const MIB: usize = 1 << 20;
/// Each test uses an eighth of the arena.
const SHARE: usize = 8 * MIB;

fn share(number: usize) -> *mut u8 {
    let arena = Arena::reserve(8 * SHARE as u64).unwrap();
    arena.start().wrapping_add(number * SHARE)
}

/// Fills one piece, transfers it to another and compares.
fn carry(pair: &mut Pair, from: *mut u8, to: *mut u8, len: usize, seed: usize) {
    let content = bytes(len, seed);
    unsafe {
        from.copy_from_nonoverlapping(content.as_ptr(), len);
        to.write_bytes(0xEE, len);
    }
    pair.carry(vec![IoPart { ptr: from, len }], vec![IoPart { ptr: to, len }]);
    assert!(unsafe { std::slice::from_raw_parts(to, len) } == content, "bytes were changed");
    // Let the receiver's "done" reach the sender.
    for _ in 0..3 {
        pair.turn();
    }
}

/// Maps new pages, at `at` or at an address that the kernel chooses.
fn map(at: *mut u8, len: usize) -> *mut u8 {
    let fixed = if at.is_null() { 0 } else { libc::MAP_FIXED_NOREPLACE };
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | fixed;
    let mapped = unsafe { libc::mmap(at.cast(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0) };
    assert_ne!(mapped, libc::MAP_FAILED);
    assert!(at.is_null() || mapped == at.cast());
    mapped.cast()
}

/// With a stale registration, the device would access the previous pages.
#[test]
fn memory_that_may_be_freed_is_registered_for_one_transfer() {
    fake_library::device("fleeting", "");
    let mut pair = Pair::new("fleeting");
    let (mut from, mut to) = (std::ptr::null_mut(), std::ptr::null_mut());
    for seed in 0..4 {
        (from, to) = (map(from, MIB), map(to, MIB));
        carry(&mut pair, from, to, MIB, seed);
        assert_eq!(covers("fleeting", from, MIB, 0) + covers("fleeting", to, MIB, 0), 0);
        unsafe {
            libc::munmap(from.cast(), MIB);
            libc::munmap(to.cast(), MIB);
        }
    }
    let (a, b) = (pair.a.stats(), pair.b.stats());
    assert_eq!((a.registrations, a.registrations_reused), (4, 0));
    assert_eq!((b.registrations, b.registrations_reused), (4, 0));
}

#[test]
fn memory_that_stays_is_registered_once() {
    fake_library::device("kept", "");
    let mut pair = Pair::new("kept");
    let (from, to) = (share(0), share(0).wrapping_add(SHARE / 2));
    for seed in 0..5 {
        carry(&mut pair, from, to, MIB, seed);
    }
    // A part of it.
    carry(&mut pair, from.wrapping_add(100_001), to.wrapping_add(77), MIB / 2, 6);
    let (a, b) = (pair.a.stats(), pair.b.stats());
    assert_eq!((a.registrations, a.registrations_reused), (1, 5));
    assert_eq!((b.registrations, b.registrations_reused), (1, 5));
    // A larger range, whose registration then replaces the first.
    carry(&mut pair, from, to, 2 * MIB, 7);
    carry(&mut pair, from, to, MIB, 8);
    let (a, b) = (pair.a.stats(), pair.b.stats());
    assert_eq!((a.registrations, a.registrations_reused), (1, 1));
    assert_eq!((b.registrations, b.registrations_reused), (1, 1));
    if !fake_library::is_real() {
        assert_eq!(covers("kept", from, 2 * MIB, ACCESS_REMOTE_READ), 1);
        assert_eq!(covers("kept", to, 2 * MIB, ACCESS_LOCAL_WRITE), 1);
        assert_eq!(covers("kept", to, 2 * MIB, ACCESS_REMOTE_READ), 0, "what is only received is not readable");
    }
    drop(pair);
    assert_eq!(fake_library::alive("kept"), 0);
}

/// The same memory is used in both directions, beside neighbours that share a page.
#[test]
fn rights_are_only_what_a_transfer_needed() {
    fake_library::device("rights", "");
    let mut pair = Pair::new("rights");
    let (first, second) = (share(1).wrapping_add(256), share(1).wrapping_add(256 + MIB));
    let away = share(1).wrapping_add(SHARE / 2);
    carry(&mut pair, first, away, MIB, 1);
    carry(&mut pair, second, away, MIB, 2);
    let (a, b) = (pair.a.stats(), pair.b.stats());
    assert_eq!((a.registrations, a.registrations_reused), (2, 0));
    assert_eq!((b.registrations, b.registrations_reused), (1, 1));
    // Receiving into it takes another registration, without rights for the peer.
    carry(&mut pair, away, first, MIB, 3);
    let (a, b) = (pair.a.stats(), pair.b.stats());
    assert_eq!((a.registrations, b.registrations), (1, 1));
}

/// The first six registrations are the buffers of the two connections.
#[test]
fn what_is_kept_makes_room_when_memory_is_short() {
    fake_library::device("short", "reg_mr@9=12");
    let mut pair = Pair::new("short");
    let (first, second, to) = (share(2), share(2).wrapping_add(MIB), share(2).wrapping_add(SHARE / 2));
    carry(&mut pair, first, to, MIB, 1);
    assert_eq!(covers("short", first, MIB, ACCESS_REMOTE_READ), 1);
    carry(&mut pair, second, to, MIB, 2);
    assert_eq!(covers("short", first, MIB, ACCESS_REMOTE_READ), 0, "let go for the second");
    assert_eq!(covers("short", second, MIB, ACCESS_REMOTE_READ), 1);
    let (a, b) = (pair.a.stats(), pair.b.stats());
    assert_eq!((a.registration_failures, a.offered_bytes, b.registration_failures), (0, 2 * MIB as u64, 0));
}

/// Registrations kept by one connection may leave no room for another's buffers or tensors. The third piece is refused
/// and sent as bytes.
#[test]
fn what_is_kept_makes_room_for_another_connection() {
    fake_library::device("shared", "reg_mr@15=12");
    let (mut keeps, mut lacks) = (Pair::new("shared"), Pair::new("shared"));
    let (first, second, to) = (share(3), share(3).wrapping_add(MIB), share(3).wrapping_add(SHARE / 2));
    carry(&mut keeps, first, to, MIB, 1);
    assert_eq!(covers("shared", first, MIB, ACCESS_REMOTE_READ), 1);
    carry(&mut lacks, second, to, MIB, 2);
    let stats = lacks.a.stats();
    assert_eq!((stats.registration_failures, stats.offered_bytes), (1, 0));
    keeps.turn();
    assert_eq!(covers("shared", first, MIB, ACCESS_REMOTE_READ), 0, "let go when it had its turn");
    carry(&mut lacks, second, to, MIB, 3);
    assert_eq!(lacks.a.stats().offered_bytes, MIB as u64, "there is room now");
    carry(&mut keeps, first, to, MIB, 4);
    assert_eq!(keeps.a.stats().registration_failures, 0);
}

/// A new connection's buffers take the room of registrations that another connection of its reactor releases.
#[test]
fn what_is_kept_makes_room_for_a_new_connection() {
    fake_library::device("newcomer", "reg_mr@9=12");
    let mut pair = Pair::new("newcomer");
    let (first, to) = (share(4), share(4).wrapping_add(SHARE / 2));
    carry(&mut pair, first, to, MIB, 1);
    assert_eq!(covers("newcomer", first, MIB, ACCESS_REMOTE_READ), 1);
    let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    let token = pair.a.driver.register(socket.into()).unwrap();
    pair.a.driver.offload().unwrap().prepare(token).unwrap();
    assert_eq!(covers("newcomer", first, MIB, ACCESS_REMOTE_READ), 0, "let go for the buffers");
}
