//! What a connection knows and counts about its requests, and requests that are as large as they may be.

use std::time::Duration;

use starwire_protocol::{Call, Segment};

use crate::owner::Ended;
use crate::pair::{Pair, settings};
use crate::promises::{KEY, assert_healthy, limited};
use crate::random::bytes_of;
use crate::wire::{self, RawPeer};

#[test]
fn a_connection_with_open_requests_is_not_idle() {
    let mut pair = Pair::ready();
    for end in [&pair.client, &pair.server] {
        assert!(end.owner.ready.is_some());
        assert_eq!(end.connection.peer(), end.owner.ready.as_ref());
    }
    let ids = [pair.recv(KEY), pair.call(1, b"", None, None)];
    pair.run();
    for end in [&pair.client, &pair.server] {
        assert_eq!((end.connection.in_flight(), end.connection.is_idle()), (2, false));
    }
    for id in ids {
        pair.reply(id, 0, b"", None);
    }
    pair.run();
    for end in [&pair.client, &pair.server] {
        assert_eq!((end.connection.in_flight(), end.connection.is_idle()), (0, true));
    }
}

#[test]
fn p09_an_answered_call_leaves_no_deadline_behind() {
    let mut pair = Pair::ready();
    let id = pair.call(5, b"", None, Some(Duration::from_millis(300)));
    pair.run();
    assert_eq!(pair.client.connection.next_timeout(), Some(pair.now + Duration::from_millis(300)));
    pair.reply(id, 0, b"", None);
    pair.run();
    assert_eq!(pair.client.connection.next_timeout(), Some(pair.now + Duration::from_secs(1)), "the keep-alive");
}

#[test]
fn p09_a_deadline_does_not_end_the_handshake() {
    let mut pair = Pair::new(settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
    pair.call(5, b"", None, Some(Duration::from_millis(300)));
    pair.advance(Duration::from_millis(300));
    assert_eq!((&pair.client.error, pair.client.owner.ended.len()), (&None, 1));
    pair.run();
    assert!(pair.client.connection.is_ready());
}

#[test]
fn p11_pings_are_numbered() {
    let mut peer = RawPeer::serving(settings("/job:worker/task:0", 1));
    for nonce in 1..4 {
        peer.now += Duration::from_secs(1);
        peer.end.on_timeout(peer.now);
        assert_eq!(peer.listen_frames(), [(wire::PING, nonce)]);
        peer.say(&[wire::RawFrame::new(wire::PONG, nonce)]);
    }
}

#[test]
fn p12_the_longest_key_is_not_too_long() {
    let mut pair = Pair::ready();
    let id = pair.recv(&[b'x'; 4096]);
    pair.run();
    assert!(pair.server.owner.take_request(id).is_some());
    assert_healthy(&pair);
}

#[test]
fn p18_the_longest_metadata_of_a_reply_arrives() {
    let mut pair = Pair::ready();
    let id = pair.call(1, b"", None, None);
    pair.run();
    pair.reply(id, 0, &vec![7; 1 << 20], None);
    pair.run();
    assert!(matches!(&pair.client.owner.ended[&id], Ended::Ok { meta, .. } if meta.len() == 1 << 20));
}

#[test]
fn an_id_that_is_used_twice_ends_the_second_request_only() {
    let mut pair = Pair::ready();
    let id = pair.recv(KEY);
    pair.client.recv_key(pair.now, id, KEY);
    let twin = pair.client.owner.ended.remove(&id);
    assert!(matches!(&twin, Some(Ended::Local { code: 13, message }) if message.contains("used twice")), "{twin:?}");
    pair.run();
    pair.reply(id, 0, b"first", None);
    pair.run();
    assert_eq!(pair.client.owner.ended[&id], Ended::Ok { meta: b"first".to_vec(), parts: Vec::new() });
    assert_healthy(&pair);
}

#[test]
fn every_request_and_every_byte_is_counted() {
    let mut pair = limited(|limits| limits.max_keys = 1);
    let parts = || Some(vec![bytes_of(1, 100), bytes_of(2, 50)]);
    let ids = [pair.recv(b"a"), pair.call(1, b"", parts(), None), pair.call(1, b"", parts(), None), pair.recv(b"b")];
    pair.run();
    for id in ids {
        pair.reply(id, 0, b"", parts());
    }
    pair.run();
    let (client, server) = (*pair.client.connection.stats(), *pair.server.connection.stats());
    for stats in [client, server] {
        assert_eq!((stats.calls, stats.replies, stats.keys, stats.key_resets), (2, 4, 2, 1), "{stats:?}");
    }
    for (from, to, bytes) in [(client, server, 300), (server, client, 600)] {
        assert_eq!((from.payload_out, from.copied_out, to.payload_in, to.copied_in), (bytes, bytes, bytes, bytes));
        assert_eq!((from.blocks_out, from.bytes_out), (to.blocks_in, to.bytes_in));
        assert!(from.blocks_out >= 2 && from.bytes_out > bytes);
    }
}

/// As p15, on the client.
#[test]
fn calls_that_pile_up_are_not_copied() {
    let mut pair = Pair::ready();
    for _ in 0..1200 {
        pair.call(1, b"", Some(vec![vec![5; 8000]]), None);
    }
    // 8 MiB are.
    assert!((100..200).contains(&pair.client.payloads.get()), "{}", pair.client.payloads.get());
    pair.run();
    assert_healthy(&pair);
    assert_eq!((pair.server.owner.requests.len(), pair.client.payloads.get()), (1200, 0));
}

#[test]
fn small_payloads_keep_their_place() {
    let mut peer = RawPeer::serving(settings("/job:worker/task:0", 1));
    let payload = peer.end.payload(vec![vec![3; 100]]);
    let call = Call { id: 1, method: 5, meta: Vec::new(), payload, deadline: None, op: () };
    peer.end.call(peer.now, call);
    peer.end.recv_key(peer.now, 2, KEY);
    assert_eq!(peer.listen_frames(), [(wire::CALL, 1), (wire::KEY, 0), (wire::RECV, 2)]);
}

#[test]
fn a_written_block_is_used_again() {
    let mut pair = Pair::ready();
    let mut capacity = || {
        pair.recv(KEY);
        let mut segments = Vec::new();
        assert_ne!(pair.client.connection.poll_transmit(pair.now, &mut segments), 0);
        let Some(Segment::Control(bytes)) = segments.pop() else { panic!("no control bytes") };
        let capacity = bytes.capacity();
        pair.client.connection.recycle(bytes);
        capacity
    };
    // The first one needs more, for the key.
    let first = capacity();
    assert_eq!(capacity(), first);
}
