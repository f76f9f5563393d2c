//! Waiting, closing, releasing; tokens and their operations.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use starwire_net::reactor::driver::{Completion, IoPart, Token};
use starwire_net::transport::SocketAddress;

use crate::rig::{PATIENCE, Rig, pattern};

pub fn close_ends_a_receive_in_flight(mut rig: Rig) {
    let (client, _peer) = rig.with_plain_peer();
    let mut buffer = vec![7; 1000];
    rig.start_recv(client, &mut buffer);
    rig.quiet(Duration::from_millis(10));
    rig.driver.close(client);
    rig.closed(client);
    assert!(buffer.iter().all(|byte| *byte == 7));
    drop(buffer);
    rig.quiet(Duration::from_millis(20));
}

pub fn close_ends_a_send_in_flight(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    let message = pattern(64 << 20);
    // More than the kernel buffers, so that sooner or later a send has to wait.
    rig.start_send(client, &message);
    let mut out = Vec::new();
    let mut sent = 0;
    let end = Instant::now() + Duration::from_millis(300);
    while Instant::now() < end {
        rig.driver.wait(Some(Duration::from_millis(20)), &mut out).unwrap();
        for completion in out.drain(..) {
            let Completion::Send { result, .. } = completion else { panic!("not a send") };
            sent += result.unwrap();
            rig.start_send(client, &message[sent..]);
        }
    }
    rig.driver.close(client);
    rig.closed(client);
    drop(message);
    // Data taken before the close arrives, then the stream ends.
    let mut arrived = Vec::new();
    peer.read_to_end(&mut arrived).unwrap();
    assert!(arrived.len() >= sent && arrived == pattern(arrived.len()));
}

pub fn close_reports_nothing_else(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    let (mut buffer, mut first) = ([0; 4], [0]);
    rig.send(client, b"data").unwrap();
    // The rest has arrived with it.
    assert_eq!(rig.recv(server, &mut first).unwrap(), 1);
    rig.start_recv(server, &mut buffer);
    rig.start_send(server, b"more");
    rig.driver.close(server);
    rig.driver.close(server);
    rig.closed(server);
    rig.quiet(Duration::from_millis(20));
}

fn wake(fd: i32) {
    // SAFETY: eight readable bytes; the descriptor is the driver's, which outlives this call in every test here.
    assert_eq!(unsafe { libc::write(fd, 1u64.to_ne_bytes().as_ptr().cast(), 8) }, 8);
}

pub fn another_thread_wakes_a_wait(mut rig: Rig) {
    let fd = rig.driver.wake_fd();
    for _ in 0..20 {
        let waker = std::thread::spawn(move || {
            // The wait has begun, most times. If it has not, the wake-up counts as well.
            std::thread::sleep(Duration::from_millis(5));
            wake(fd);
        });
        rig.driver.wait(None, &mut rig.pending).unwrap();
        waker.join().unwrap();
    }
    rig.quiet(Duration::from_millis(20));
}

pub fn a_wake_up_before_the_wait_counts(mut rig: Rig) {
    for times in [1, 2, 3] {
        (0..times).for_each(|_| wake(rig.driver.wake_fd()));
        rig.driver.wait(None, &mut rig.pending).unwrap();
    }
    // But the wake-up does not persist.
    rig.driver.wait(Some(Duration::ZERO), &mut rig.pending).unwrap();
    let start = Instant::now();
    rig.driver.wait(Some(Duration::from_millis(30)), &mut rig.pending).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(29), "{:?}", start.elapsed());
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

pub fn timeouts_are_kept(mut rig: Rig) {
    const SHORTEST: Duration = Duration::from_micros(200);
    // Never early; and not much later than threads that sleep so long beside it, whatever else this machine does.
    for micros in [0, 200, 1500, 20_000] {
        let timeout = Duration::from_micros(micros);
        let (mut waits, mut sleeps) = (Vec::new(), Vec::new());
        for _ in 0..20 {
            let start = Instant::now();
            rig.driver.wait(Some(timeout), &mut rig.pending).unwrap();
            waits.push(start.elapsed());
            let start = Instant::now();
            std::thread::sleep(timeout.max(SHORTEST));
            sleeps.push(start.elapsed());
        }
        assert!(waits.iter().all(|took| *took >= timeout), "{waits:?} of {timeout:?}");
        // A wrong unit is late by a factor of a thousand, and a driver that counts milliseconds by one of five.
        let latest = sleeps.iter().max().copied().unwrap_or_default();
        let most = 50 * latest;
        assert!(median(waits.clone()) < most, "{waits:?} for {timeout:?}: more than {most:?}");
    }
    assert!(rig.pending.is_empty());
}

pub fn stale_tokens_are_refused(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    rig.driver.close(client);
    let mut byte = [0];
    let part = [IoPart { ptr: byte.as_mut_ptr(), len: 1 }];
    let refused = |rig: &mut Rig, token: Token| {
        let address = SocketAddress::Inet("127.0.0.1:1".parse().unwrap());
        // SAFETY: refused operations access no memory.
        let results = unsafe { [rig.driver.recv(token, &part), rig.driver.send(token, &part)] };
        results.into_iter().for_each(|result| assert_eq!(result.unwrap_err().kind(), io::ErrorKind::NotFound));
        assert_eq!(rig.driver.accept(token).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(rig.driver.connect(token, &address).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert_eq!(rig.driver.release(token).unwrap_err().kind(), io::ErrorKind::NotFound);
        rig.driver.close(token);
    };
    refused(&mut rig, client);
    rig.closed(client);
    refused(&mut rig, client);
    // The slot's next tenant gets a different token.
    let (listener, address) = rig.listen_tcp();
    let (next, _) = rig.pair(listener, &address);
    assert_ne!(next, client);
    refused(&mut rig, client);
    refused(&mut rig, Token(0));
    refused(&mut rig, Token(u64::MAX));
    rig.send(next, b"alive").unwrap();
    assert_eq!(rig.recv(server, &mut byte).unwrap(), 0);
    rig.quiet(Duration::from_millis(10));
}

pub fn released_descriptors_work_on(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    let mut buffer = [0; 4];
    rig.start_recv(client, &mut buffer);
    assert_eq!(rig.driver.release(client).unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    peer.write_all(b"abcdefgh").unwrap();
    assert_eq!(rig.received(client).unwrap(), 4);
    let fd = rig.driver.release(client).unwrap();
    // SAFETY: F_GETFL takes no pointers.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    assert_ne!(flags & libc::O_NONBLOCK, 0, "it comes back non-blocking, as it was taken");
    let mut stream = TcpStream::from(fd);
    stream.set_nonblocking(false).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.read_exact(&mut buffer).unwrap();
    assert_eq!(&buffer, b"efgh");
    // It can be registered with another driver, or this one again.
    stream.set_nonblocking(true).unwrap();
    let again = rig.driver.register(stream.into()).unwrap();
    assert_ne!(again, client);
    rig.start_recv(again, &mut buffer);
    peer.write_all(b"more").unwrap();
    assert_eq!(rig.received(again).unwrap(), 4);
    rig.quiet(Duration::from_millis(10));
}

pub fn one_operation_per_direction(mut rig: Rig) {
    let (client, _peer) = rig.with_plain_peer();
    let (mut first, mut second) = ([0; 4], [0; 4]);
    rig.start_recv(client, &mut first);
    let part = [IoPart { ptr: second.as_mut_ptr(), len: 4 }];
    // SAFETY: the buffer outlives the call, which is refused.
    let error = unsafe { rig.driver.recv(client, &part) }.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
    rig.driver.close(client);
    rig.closed(client);
}

pub fn operations_on_no_bytes_are_refused(mut rig: Rig) {
    let (client, _peer) = rig.with_plain_peer();
    let empty = [IoPart { ptr: std::ptr::null_mut(), len: 0 }];
    // SAFETY: the parts are empty, so no memory is accessed.
    let results = unsafe {
        [
            rig.driver.recv(client, &[]),
            rig.driver.recv(client, &empty),
            rig.driver.send(client, &[]),
            rig.driver.send(client, &empty),
        ]
    };
    results.into_iter().for_each(|result| assert_eq!(result.unwrap_err().kind(), io::ErrorKind::InvalidInput));
    // The refusals leave the descriptor usable.
    rig.send(client, b"x").unwrap();
}

pub fn everything_can_be_ended_at_once(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    let (listener, address) = rig.listen_tcp();
    let (other, server) = rig.pair(listener, &address);
    rig.start_connect(&address);
    let message = pattern(64 << 20);
    let mut buffer = vec![7u8; 4096];
    rig.start_send(other, &message);
    rig.start_recv(client, &mut buffer);
    rig.driver.wait(Some(Duration::ZERO), &mut rig.pending).unwrap();
    assert!(rig.driver.quiesce(PATIENCE));
    drop(message);
    let _ = peer.write_all(&[9; 4096]);
    assert!(buffer.iter().all(|byte| *byte == 7));
    rig.pending.clear();
    rig.quiet(Duration::from_millis(10));
    for token in [client, listener, other, server] {
        assert_eq!(rig.driver.release(token).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
    // The driver itself remains usable.
    let (client, server) = rig.tcp_pair();
    rig.send(client, b"again").unwrap();
    assert_eq!(rig.recv(server, &mut buffer).unwrap(), 5);
}

pub fn dropping_the_driver_with_operations_in_flight_is_safe(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    let (_listener, _) = rig.listen_tcp();
    let mut buffer = vec![7u8; 4096];
    rig.start_recv(client, &mut buffer);
    rig.driver.wait(Some(Duration::ZERO), &mut rig.pending).unwrap();
    drop(rig);
    // The peer sees the end (or its writes fail), and the buffer is no longer written to.
    let _ = peer.write_all(&[9; 4096]);
    let mut rest = Vec::new();
    let _ = peer.read_to_end(&mut rest);
    assert!(buffer.iter().all(|byte| *byte == 7));
}
