//! The verbs driver and its queue pairs.

#![allow(clippy::undocumented_unsafe_blocks, reason = "buffers outlive the operations, which every test waits for")]

use std::io::{self, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use starwire_engine::config::VerbsConfig;
use starwire_net::reactor::driver::{Completion, Driver, IoPart, Token};
use starwire_net::reactor::uring::UringDriver;
use starwire_net::transport::SocketAddress;
use starwire_net::transport::verbs::Endpoint;

use super::pair::{Pair, bytes, config, epoll, sockets};
use crate::harness::fake_library;

#[test]
fn every_size_arrives_unchanged() {
    fake_library::device("sizes", "");
    let mut pair = Pair::new("sizes");
    for (seed, len) in [1, 2, 1023, 16_360, 16_384, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 1, 5 << 20, 64 << 20]
        .into_iter()
        .enumerate()
    {
        pair.transfer(&[bytes(len, seed)], &[len]);
    }
}

#[test]
fn large_pieces_are_read_straight_and_small_ones_are_copied() {
    fake_library::device("straight", "");
    let mut pair = Pair::new("straight");
    pair.transfer(&[bytes(1024, 1), bytes(3 << 20, 2), bytes(100, 3)], &[1024, 3 << 20, 100]);
    let (a, b) = (pair.a.stats(), pair.b.stats());
    assert_eq!((a.offered_bytes, a.copied), (3 << 20, 1124));
    assert_eq!((b.read_bytes, b.copied, b.bounced), (3 << 20, 1124, 0));
    if !fake_library::is_real() {
        assert_eq!(b.reads, 3, "the device takes at most 1 MiB at once");
    }
    assert!(a.messages_sent <= 3, "one message for the control bytes and the offer, one for the rest: {a:?}");
}

#[test]
fn the_receivers_pieces_need_not_match_the_senders() {
    fake_library::device("pieces", "");
    let mut pair = Pair::new("pieces");
    let out = [bytes(200_000, 1), bytes(10, 2), bytes(70_000, 3), bytes(300_000, 4)];
    let total: usize = out.iter().map(Vec::len).sum();
    pair.transfer(&out, &[1, 4095, 4097, 100_000, total - 108_193]);
    pair.transfer(&out, &[total]);
    pair.transfer(&out, &[250_000, 20, total - 250_020]);
}

#[test]
fn credits_last_for_thousands_of_messages_to_a_slow_receiver() {
    fake_library::device("credits", "");
    let mut pair = Pair::new("credits");
    let out: Vec<Vec<u8>> = (0..400).map(|i| bytes(1 + i * 97 % 30_000, i)).collect();
    let token = pair.a.token;
    let parts: Vec<IoPart> = out.iter().map(|p| IoPart { ptr: p.as_ptr().cast_mut(), len: p.len() }).collect();
    unsafe { pair.a.driver.send(token, &parts).unwrap() };
    for _ in 0..20 {
        pair.turn();
    }
    assert!(pair.a.take_send().is_none(), "no credits are left, and nothing was dropped");
    let total = out.concat().len();
    let mut target = vec![0u8; total];
    let mut received = 0;
    while received < total {
        let token = pair.b.token;
        let part = IoPart { ptr: target[received..].as_mut_ptr(), len: total - received };
        unsafe { pair.b.driver.recv(token, &[part]).unwrap() };
        received += pair.wait("a receive", |pair| pair.b.take_recv()).unwrap();
    }
    let sent = pair.wait("the send", |pair| pair.a.take_send()).unwrap();
    assert_eq!(sent, total);
    assert!(target == out.concat());
}

#[test]
fn as_many_messages_wait_as_there_are_buffers() {
    fake_library::device("buffers", "queue=3000");
    let config = VerbsConfig { buffer_bytes: 64 << 20, direct_min: u64::MAX, ..config("buffers") };
    let mut pair = Pair::with(&config, epoll(), epoll());
    let out = bytes(48 << 20, 1);
    let token = pair.a.token;
    unsafe { pair.a.driver.send(token, &[IoPart { ptr: out.as_ptr().cast_mut(), len: out.len() }]).unwrap() };
    let mut messages = 0;
    pair.wait("the messages", |pair| {
        messages += pair.a.stats().messages_sent;
        (messages > 2500).then_some(())
    });
    let mut target = vec![0u8; out.len()];
    let mut received = 0;
    while received < out.len() {
        let token = pair.b.token;
        let part = IoPart { ptr: target[received..].as_mut_ptr(), len: out.len() - received };
        unsafe { pair.b.driver.recv(token, &[part]).unwrap() };
        let n = pair.wait("a receive", |pair| pair.b.take_recv()).unwrap();
        assert_ne!(n, 0, "the end of the stream");
        received += n;
    }
    assert_eq!(pair.wait("the send", |pair| pair.a.take_send()).unwrap(), out.len());
    assert!(target == out);
}

/// The inner driver of one with queue pairs; says whether it was told to end all operations while both were there.
struct Witness(Box<dyn Driver>, Arc<AtomicBool>);

impl Driver for Witness {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn register(&mut self, fd: OwnedFd) -> io::Result<Token> {
        self.0.register(fd)
    }
    fn accept(&mut self, listener: Token) -> io::Result<()> {
        self.0.accept(listener)
    }
    fn connect(&mut self, token: Token, address: &SocketAddress) -> io::Result<()> {
        self.0.connect(token, address)
    }
    unsafe fn recv(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        unsafe { self.0.recv(token, parts) }
    }
    unsafe fn send(&mut self, token: Token, parts: &[IoPart]) -> io::Result<()> {
        unsafe { self.0.send(token, parts) }
    }
    fn watch(&mut self, fd: OwnedFd) -> io::Result<Token> {
        self.0.watch(fd)
    }
    fn finish(&mut self, token: Token) {
        self.0.finish(token);
    }
    fn close(&mut self, token: Token) {
        self.0.close(token);
    }
    fn release(&mut self, token: Token) -> io::Result<OwnedFd> {
        self.0.release(token)
    }
    fn quiesce(&mut self, patience: Duration) -> bool {
        self.1.store(true, Ordering::Relaxed);
        self.0.quiesce(patience)
    }
    fn wait(&mut self, timeout: Option<Duration>, out: &mut Vec<Completion>) -> io::Result<()> {
        self.0.wait(timeout, out)
    }
    fn wake_fd(&self) -> RawFd {
        self.0.wake_fd()
    }
}

#[test]
fn a_driver_that_is_dropped_ends_the_operations_on_its_sockets_first() {
    fake_library::device("dropped", "");
    let is_quiet = Arc::new(AtomicBool::new(false));
    let first = Box::new(Witness(epoll(), is_quiet.clone()));
    let pair = Pair::with(&config("dropped"), first, epoll());
    drop(pair.a);
    assert!(is_quiet.load(Ordering::Relaxed), "the kernel may still write to the last bytes of the connections");
}

#[test]
fn both_directions_at_once_with_neither_side_reading_at_first() {
    fake_library::device("duplex", "");
    let mut pair = Pair::new("duplex");
    let (x, y) = ([bytes(600_000, 1), bytes(1 << 20, 2)], [bytes(700_000, 3), bytes(2 << 20, 4)]);
    let parts = |all: &[Vec<u8>]| -> Vec<IoPart> {
        all.iter().map(|p| IoPart { ptr: p.as_ptr().cast_mut(), len: p.len() }).collect()
    };
    let (ta, tb) = (pair.a.token, pair.b.token);
    unsafe {
        pair.a.driver.send(ta, &parts(&x)).unwrap();
        pair.b.driver.send(tb, &parts(&y)).unwrap();
    }
    for _ in 0..20 {
        pair.turn();
    }
    let (mut to_b, mut to_a) = (vec![0u8; 600_000 + (1 << 20)], vec![0u8; 700_000 + (2 << 20)]);
    let (mut in_b, mut in_a) = (0, 0);
    while in_b < to_b.len() || in_a < to_a.len() {
        if in_b < to_b.len() {
            let part = IoPart { ptr: to_b[in_b..].as_mut_ptr(), len: to_b.len() - in_b };
            unsafe { pair.b.driver.recv(tb, &[part]).unwrap() };
            in_b += pair.wait("b", |pair| pair.b.take_recv()).unwrap();
        }
        if in_a < to_a.len() {
            let part = IoPart { ptr: to_a[in_a..].as_mut_ptr(), len: to_a.len() - in_a };
            unsafe { pair.a.driver.recv(ta, &[part]).unwrap() };
            in_a += pair.wait("a", |pair| pair.a.take_recv()).unwrap();
        }
    }
    assert!(to_b == x.concat() && to_a == y.concat());
}

#[test]
fn the_end_of_the_socket_follows_received_messages() {
    fake_library::device("end", "");
    let mut pair = Pair::new("end");
    let (ta, tb) = (pair.a.token, pair.b.token);
    let hello = *b"hello";
    unsafe { pair.a.driver.send(ta, &[IoPart { ptr: hello.as_ptr().cast_mut(), len: 5 }]).unwrap() };
    pair.wait("the send", |pair| pair.a.take_send()).unwrap();
    // A message that the socket's end overtakes is lost.
    let mut received = 0;
    pair.wait("the message", |pair| {
        received += pair.b.stats().messages_received;
        (received > 0).then_some(())
    });
    pair.a.driver.close(ta);
    pair.wait("closed", |pair| pair.a.seen.iter().any(|c| matches!(c, Completion::Closed { .. })).then_some(()));
    let mut target = [0u8; 8];
    unsafe { pair.b.driver.recv(tb, &[IoPart { ptr: target.as_mut_ptr(), len: 8 }]).unwrap() };
    assert_eq!(pair.wait("the last bytes", |pair| pair.b.take_recv()).unwrap(), 5);
    assert_eq!(&target[..5], b"hello");
    unsafe { pair.b.driver.recv(tb, &[IoPart { ptr: target.as_mut_ptr(), len: 8 }]).unwrap() };
    assert_eq!(pair.wait("the end", |pair| pair.b.take_recv()).unwrap(), 0);
}

#[test]
fn bytes_on_the_socket_after_the_move_are_an_error() {
    fake_library::device("talks", "");
    let mut sockets = sockets();
    sockets[0].write_all(b"x").unwrap();
    let mut pair = Pair::over(sockets, &config("talks"), epoll(), epoll());
    let (tb, mut target) = (pair.b.token, [0u8; 8]);
    unsafe { pair.b.driver.recv(tb, &[IoPart { ptr: target.as_mut_ptr(), len: 8 }]).unwrap() };
    let error = pair.wait("the error", |pair| pair.b.take_recv()).unwrap_err().to_string();
    assert!(error.contains("it sent bytes over the socket after the move to RDMA"), "{error}");
}

/// Retries of an unanswered READ last for the configured time, and on soft-RoCE seven retries mean without end.
#[test]
fn the_end_of_the_socket_ends_a_read_that_nobody_answers() {
    fake_library::device("unanswered", "lost@1");
    let mut pair = Pair::new("unanswered");
    let (ta, tb, out) = (pair.a.token, pair.b.token, bytes(200_000, 1));
    let mut target = vec![0u8; 200_000];
    unsafe {
        pair.a.driver.send(ta, &[IoPart { ptr: out.as_ptr().cast_mut(), len: out.len() }]).unwrap();
        pair.b.driver.recv(tb, &[IoPart { ptr: target.as_mut_ptr(), len: target.len() }]).unwrap();
    }
    pair.wait("the READ", |pair| (pair.b.stats().reads == 1).then_some(()));
    assert!(pair.b.take_recv().is_none());
    pair.a.driver.close(ta);
    assert_eq!(pair.wait("the end", |pair| pair.b.take_recv()).unwrap(), 0);
    drop(pair);
    assert_eq!(fake_library::alive("unanswered"), 0);
}

/// Writing to a socket would fail; the queue pair may not report an error.
#[test]
fn the_end_of_the_socket_ends_a_send_to_a_peer_that_does_not_read() {
    fake_library::device("untaken", "");
    let mut pair = Pair::new("untaken");
    let (ta, tb, out) = (pair.a.token, pair.b.token, bytes(200_000, 1));
    unsafe { pair.b.driver.send(tb, &[IoPart { ptr: out.as_ptr().cast_mut(), len: out.len() }]).unwrap() };
    for _ in 0..20 {
        pair.turn();
    }
    assert!(pair.b.take_send().is_none(), "nobody has read what was offered");
    pair.a.driver.close(ta);
    let error = pair.wait("the end", |pair| pair.b.take_send()).unwrap_err().to_string();
    assert!(error.contains("closed the connection before it received everything"), "{error}");
}

/// Bytes that have already arrived can still be received, but not those that are still with the peer.
#[test]
fn an_offer_that_is_received_after_a_failure_is_an_error() {
    fake_library::device("too late", "post_send@2=12");
    let mut pair = Pair::new("too late");
    let (ta, tb) = (pair.a.token, pair.b.token);
    let out = [bytes(10, 1), bytes(200_000, 2)];
    let parts: Vec<IoPart> = out.iter().map(|p| IoPart { ptr: p.as_ptr().cast_mut(), len: p.len() }).collect();
    unsafe { pair.a.driver.send(ta, &parts).unwrap() };
    let mut target = vec![0u8; 200_000];
    unsafe { pair.b.driver.recv(tb, &[IoPart { ptr: target.as_mut_ptr(), len: 10 }]).unwrap() };
    assert_eq!(pair.wait("the first bytes", |pair| pair.b.take_recv()).unwrap(), 10);
    // The device's second work request breaks b's queue pair.
    unsafe { pair.b.driver.send(tb, &parts[..1]).unwrap() };
    pair.wait("the failure", |pair| pair.b.take_send()).unwrap_err();
    unsafe { pair.b.driver.recv(tb, &[IoPart { ptr: target.as_mut_ptr(), len: target.len() }]).unwrap() };
    pair.wait("the error", |pair| pair.b.take_recv()).unwrap_err();
}

#[test]
fn closing_with_everything_in_flight_leaves_nothing_behind() {
    fake_library::device("leaks", "");
    let mut pair = Pair::new("leaks");
    let out = bytes(4 << 20, 1);
    let mut target = vec![0u8; 4 << 20];
    let (ta, tb) = (pair.a.token, pair.b.token);
    unsafe {
        pair.a.driver.send(ta, &[IoPart { ptr: out.as_ptr().cast_mut(), len: out.len() }]).unwrap();
        pair.b.driver.recv(tb, &[IoPart { ptr: target.as_mut_ptr(), len: target.len() }]).unwrap();
    }
    pair.turn();
    pair.a.seen.clear();
    pair.b.seen.clear();
    pair.b.driver.close(tb);
    pair.wait("closed", |pair| pair.b.seen.iter().any(|c| matches!(c, Completion::Closed { .. })).then_some(()));
    pair.a.driver.close(ta);
    pair.wait("closed", |pair| pair.a.seen.iter().any(|c| matches!(c, Completion::Closed { .. })).then_some(()));
    assert!(pair.a.take_send().is_none() && pair.b.take_recv().is_none(), "after close only `Closed` is reported");
    drop(pair);
    assert_eq!(fake_library::alive("leaks"), 0, "queue pairs, regions, contexts");
}

#[test]
fn it_works_on_io_uring_as_well() {
    let (Ok(first), Ok(second)) = (UringDriver::new(), UringDriver::new()) else {
        eprintln!("SKIPPED, NOT TESTED: no io_uring here");
        return;
    };
    fake_library::device("uring", "");
    let mut pair = Pair::with(&config("uring"), Box::new(first), Box::new(second));
    for seed in 0..5 {
        pair.transfer(&[bytes(1024, seed), bytes(200_000, seed)], &[1024, 200_000]);
    }
    drop(pair);
    assert_eq!(fake_library::alive("uring"), 0);
}

#[test]
fn what_cannot_be_registered_is_copied() {
    // The first six registrations are the buffers of the two connections.
    for (spec, copies_at_sender) in [("reg_mr@7=12", true), ("reg_mr@8=12", false), ("reg_mr@7+=12", true)] {
        let name = format!("copied {spec}");
        fake_library::device(&name, spec);
        let mut pair = Pair::new(&name);
        pair.transfer(&[bytes(150_000, 1)], &[150_000]);
        let (a, b) = (pair.a.stats(), pair.b.stats());
        assert!(a.registration_failures + b.registration_failures > 0, "{spec}: {a:?} {b:?}");
        if copies_at_sender {
            assert_eq!((a.offered_bytes, b.copied), (0, 150_000), "{spec}");
        } else {
            assert_eq!(a.offered_bytes, 150_000, "{spec}");
            assert!(b.bounced > 0 && b.bounced + b.read_bytes == 150_000, "{spec}: {b:?}");
        }
    }
}

#[test]
fn failed_requests_end_both_operations_with_a_sentence() {
    for (spec, sentence) in [
        ("send@1=12", "RETRY_EXC_ERR"),
        ("send@1=13", "RNR_RETRY_EXC_ERR"),
        ("cq_err@1=1", "overflowed"),
        ("fatal@1=1", "the device has failed"),
        ("post_send@1=12", "rejected a work request"),
    ] {
        let name = format!("failed {spec}");
        fake_library::device(&name, spec);
        let mut pair = Pair::new(&name);
        let (ta, out) = (pair.a.token, bytes(200_000, 1));
        let mut target = [0u8; 8];
        unsafe {
            pair.a.driver.recv(ta, &[IoPart { ptr: target.as_mut_ptr(), len: 8 }]).unwrap();
            pair.a.driver.send(ta, &[IoPart { ptr: out.as_ptr().cast_mut(), len: out.len() }]).unwrap();
        }
        let received = pair.wait("the receive's end", |pair| pair.a.take_recv()).unwrap_err().to_string();
        let sent = pair.wait("the send's end", |pair| pair.a.take_send()).unwrap_err().to_string();
        assert!(received.contains(sentence) && sent.contains(sentence), "{spec}: {received}; {sent}");
    }
}

/// If domains were shared, the second queue pair would not allocate one and not meet the fault.
#[test]
fn each_queue_pair_has_a_protection_domain_and_packet_numbers_of_its_own() {
    fake_library::device("own", "alloc_pd@9=12");
    let mut pair = Pair::new("own");
    let mut numbers = std::collections::BTreeSet::new();
    let prepare = |pair: &mut Pair| {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        socket.set_nonblocking(true).unwrap();
        let token = pair.a.driver.register(socket.into()).unwrap();
        pair.a.driver.offload().unwrap().prepare(token)
    };
    for _ in 3..=8 {
        numbers.insert(Endpoint::decode(&prepare(&mut pair).unwrap()).unwrap().psn);
    }
    assert_eq!(numbers.len(), 6, "not random: {numbers:?}");
    let error = prepare(&mut pair).unwrap_err().to_string();
    assert!(error.contains("cannot create protection domain"), "{error}");
}

#[test]
fn a_refused_read_is_named() {
    fake_library::device("read", "read@1=10");
    let mut pair = Pair::new("read");
    let (ta, tb, out) = (pair.a.token, pair.b.token, bytes(200_000, 1));
    let mut target = vec![0u8; 200_000];
    unsafe {
        pair.a.driver.send(ta, &[IoPart { ptr: out.as_ptr().cast_mut(), len: out.len() }]).unwrap();
        pair.b.driver.recv(tb, &[IoPart { ptr: target.as_mut_ptr(), len: target.len() }]).unwrap();
    }
    let error = pair.wait("the receive's end", |pair| pair.b.take_recv()).unwrap_err().to_string();
    assert!(error.contains("reading from the peer's memory failed") && error.contains("REM_ACCESS_ERR"), "{error}");
}
