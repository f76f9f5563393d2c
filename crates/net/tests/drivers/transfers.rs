//! Bytes arrive completely and in order, and so does their end.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::time::Duration;

use starwire_net::reactor::driver::{Completion, IoPart, Token};
use starwire_net::transport::{SocketAddress, tcp};

use crate::rig::{Rig, pattern};

fn echo(mut rig: Rig, client: Token, server: Token) {
    for len in [1, 64, 4096, 100_000] {
        let message = pattern(len);
        let mut buffer = vec![0; len];
        rig.start_send(client, &message);
        rig.recv_exact(server, &mut buffer);
        assert_eq!(rig.sent(client).unwrap(), len);
        rig.start_send(server, &buffer);
        let mut back = vec![0; len];
        rig.recv_exact(client, &mut back);
        assert_eq!(rig.sent(server).unwrap(), len);
        assert!(back == message);
    }
}

pub fn echo_over_tcp(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    echo(rig, client, server);
}

pub fn echo_over_unix(mut rig: Rig) {
    let (listener, address) = rig.listen_unix();
    let (client, server) = rig.pair(listener, &address);
    // A unix socket takes 100,000 bytes at once only if its buffer is larger.
    echo(rig, client, server);
}

pub fn nothing_is_reported_twice(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    let mut buffer = [0; 8];
    rig.start_recv(server, &mut buffer);
    rig.send(client, b"12345678").unwrap();
    assert_eq!(rig.received(server).unwrap(), 8);
    rig.quiet(Duration::from_millis(50));
}

pub fn partial_writes_lose_nothing(mut rig: Rig) {
    let options = tcp::TcpOptions { send_buffer: Some(4096), ..Default::default() };
    let (listener, address) = rig.listen_tcp();
    let SocketAddress::Inet(inet) = address.clone() else { unreachable!() };
    let client = rig.driver.register(tcp::socket(inet, &options).unwrap()).unwrap();
    rig.driver.connect(client, &address).unwrap();
    rig.connected(client).unwrap();
    let fd = rig.accepted(listener).unwrap();
    tcp::configure(&fd, &options).unwrap();
    let server = rig.driver.register(fd).unwrap();

    let message = pattern(256 << 10);
    let mut buffer = vec![0; message.len()];
    let (mut sent, mut received, mut pieces) = (0, 0, 0);
    rig.start_send(client, &message);
    rig.start_recv(server, &mut buffer);
    while received < message.len() {
        let (was_send, count) = rig.take("progress", |completion| match completion {
            Completion::Send { token, result } if token == client => Ok((true, result.unwrap())),
            Completion::Recv { token, result } if token == server => Ok((false, result.unwrap())),
            other => Err(other),
        });
        assert_ne!(count, 0);
        if was_send {
            sent += count;
            pieces += 1;
            if sent < message.len() {
                rig.start_send(client, &message[sent..]);
            }
        } else {
            received += count;
            if received < message.len() {
                rig.start_recv(server, &mut buffer[received..]);
            }
        }
    }
    assert!(buffer == message);
    // io_uring may complete a whole send internally; a driver that sees short counts has to continue.
    assert!(pieces > 1 || rig.driver.name() != "epoll");
}

pub fn a_peers_reset_is_an_error(mut rig: Rig) {
    let (client, peer) = rig.with_plain_peer();
    let mut buffer = [0; 16];
    rig.start_recv(client, &mut buffer);
    let linger = libc::linger { l_onoff: 1, l_linger: 0 };
    let len = size_of::<libc::linger>() as libc::socklen_t;
    // SAFETY: `linger` has `len` bytes.
    let set = unsafe {
        libc::setsockopt(peer.as_raw_fd(), libc::SOL_SOCKET, libc::SO_LINGER, (&raw const linger).cast(), len)
    };
    assert_eq!(set, 0);
    drop(peer);
    assert_eq!(rig.received(client).unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    // An error, not SIGPIPE.
    let kind = rig.send(client, b"too late").unwrap_err().kind();
    assert!(matches!(kind, io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset), "{kind:?}");
}

pub fn half_close_ends_one_direction_only(mut rig: Rig) {
    let (client, mut peer) = rig.with_plain_peer();
    peer.write_all(b"last").unwrap();
    peer.shutdown(std::net::Shutdown::Write).unwrap();
    let mut buffer = [0; 16];
    assert_eq!(rig.recv(client, &mut buffer).unwrap(), 4);
    for _ in 0..3 {
        assert_eq!(rig.recv(client, &mut buffer).unwrap(), 0);
    }
    rig.send_all(client, b"still here");
    let mut answer = [0; 10];
    peer.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"still here");
}

pub fn data_before_the_end_of_stream_arrives(mut rig: Rig) {
    for round in 0..50 {
        let (client, mut peer) = rig.with_plain_peer();
        let mut buffer = [0; 4];
        rig.start_recv(client, &mut buffer);
        peer.write_all(b"123456").unwrap();
        if round % 2 == 0 {
            std::thread::yield_now();
        }
        drop(peer);
        let mut got = rig.received(client).unwrap();
        assert_eq!(&buffer[..got], &b"123456"[..got]);
        loop {
            match rig.recv(client, &mut buffer).unwrap() {
                0 => break,
                count => got += count,
            }
        }
        assert_eq!(got, 6);
        rig.driver.close(client);
        rig.closed(client);
    }
}

pub fn two_hundred_connections(mut rig: Rig) {
    let (listener, address) = rig.listen_tcp();
    let pairs: Vec<_> = (0..200).map(|_| rig.pair(listener, &address)).collect();
    let mut buffers = vec![[0u8; 8]; pairs.len()];
    for round in 0..5u64 {
        let messages: Vec<_> = (0..pairs.len() as u64).map(|index| (round << 32 | index).to_le_bytes()).collect();
        for (index, (client, server)) in pairs.iter().enumerate() {
            rig.start_recv(*server, &mut buffers[index]);
            rig.start_send(*client, &messages[index]);
        }
        for (client, server) in &pairs {
            assert_eq!(rig.sent(*client).unwrap(), 8);
            assert_eq!(rig.received(*server).unwrap(), 8);
        }
        assert!(buffers == messages);
    }
    for (client, server) in &pairs {
        rig.driver.close(*client);
        rig.driver.close(*server);
    }
    for (client, server) in &pairs {
        rig.closed(*client);
        rig.closed(*server);
    }
    rig.quiet(Duration::from_millis(10));
}

fn parts_of(bytes: &[u8], len: usize) -> Vec<IoPart> {
    bytes.chunks(len).map(|chunk| IoPart { ptr: chunk.as_ptr().cast_mut(), len: chunk.len() }).collect()
}

/// Moves `message` from one token to the other in parts of the given sizes, sending and receiving at the same time.
fn transfer(rig: &mut Rig, from: Token, to: Token, message: &[u8], send_part: usize, recv_part: usize) {
    let mut buffer = vec![0; message.len()];
    let base = buffer.as_mut_ptr();
    let (mut sent, mut received) = (0, 0);
    let start_send = |rig: &mut Rig, sent: usize| {
        // SAFETY: `message` outlives the loop below, which ends when all was received.
        unsafe { rig.driver.send(from, &parts_of(&message[sent..], send_part)) }.unwrap();
    };
    let start_recv = |rig: &mut Rig, received: usize| {
        let parts: Vec<_> = (received..message.len())
            .step_by(recv_part)
            // SAFETY: the offset is inside the buffer.
            .map(|at| IoPart { ptr: unsafe { base.add(at) }, len: recv_part.min(message.len() - at) })
            .collect();
        // SAFETY: `buffer` outlives the loop below and is not accessed meanwhile.
        unsafe { rig.driver.recv(to, &parts) }.unwrap();
    };
    start_send(rig, 0);
    start_recv(rig, 0);
    while sent < message.len() || received < message.len() {
        let (was_send, count) = rig.take("progress", |completion| match completion {
            Completion::Send { token, result } if token == from => Ok((true, result.unwrap())),
            Completion::Recv { token, result } if token == to => Ok((false, result.unwrap())),
            other => Err(other),
        });
        assert_ne!(count, 0);
        if was_send {
            sent += count;
            if sent < message.len() {
                start_send(rig, sent);
            }
        } else {
            received += count;
            if received < message.len() {
                start_recv(rig, received);
            }
        }
    }
    assert_eq!((sent, received), (message.len(), message.len()));
    assert!(buffer == message);
}

pub fn many_parts(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    // 10,000 and 3,334 parts: far more than the kernel takes at once.
    transfer(&mut rig, client, server, &pattern(100_000), 10, 30);
    let (listener, address) = rig.listen_unix();
    let (client, server) = rig.pair(listener, &address);
    transfer(&mut rig, client, server, &pattern(100_000), 30, 10);
}

pub fn a_large_transfer(mut rig: Rig) {
    let message = pattern(48 << 20);
    let (client, server) = rig.tcp_pair();
    transfer(&mut rig, client, server, &message, 1 << 20, 3 << 20);
    let (listener, address) = rig.listen_unix();
    let (client, server) = rig.pair(listener, &address);
    transfer(&mut rig, server, client, &message, 3 << 20, 1 << 20);
}

pub fn both_directions_at_once(mut rig: Rig) {
    let (client, server) = rig.tcp_pair();
    let (there, back) = (pattern(8 << 20), pattern(6 << 20));
    let mut buffers = [vec![0; there.len()], vec![0; back.len()]];
    let flows = [(client, server, &there), (server, client, &back)];
    let (mut sent, mut received) = ([0; 2], [0; 2]);
    for (flow, (from, to, message)) in flows.iter().enumerate() {
        rig.start_send(*from, message);
        rig.start_recv(*to, &mut buffers[flow]);
    }
    while (0..2).any(|flow| received[flow] < flows[flow].2.len()) {
        let (token, was_send, count) = rig.take("progress", |completion| match completion {
            Completion::Send { token, result } => Ok((token, true, result.unwrap())),
            Completion::Recv { token, result } => Ok((token, false, result.unwrap())),
            other => Err(other),
        });
        let flow = usize::from((token == client) != was_send);
        let message = flows[flow].2;
        let done = if was_send { &mut sent[flow] } else { &mut received[flow] };
        *done += count;
        let done = *done;
        match was_send {
            true if done < message.len() => rig.start_send(token, &message[done..]),
            false if done < message.len() => rig.start_recv(token, &mut buffers[flow][done..]),
            _ => {}
        }
    }
    assert!(buffers[0] == there && buffers[1] == back);
}
