//! The promises of `docs/protocol.md` about requests, one by one. Those about the handshake are in `handshake.rs`,
//! those about bad peers in `raw_peers.rs`; more about requests is in `requests.rs`.

use std::time::Duration;

use starwire_protocol::limits::{BULK_SOFT, FIRST_READ};
use starwire_protocol::{ConnectionError, Limits, Recv};

use crate::owner::{BAD_PREFIX, Ended, REFUSED_META, REFUSED_METHOD, Request};
use crate::pair::{Pair, settings};
use crate::random::bytes_of;
use crate::wire::{self, RawPeer};

pub const KEY: &[u8] = b"/job:ps/replica:0/task:0/device:CPU:0;0001;/job:worker/replica:0/task:0/device:CPU:0;edge_1_w";

pub fn limited(change: impl FnOnce(&mut Limits)) -> Pair {
    let mut server = settings("/job:ps/task:0", 2);
    change(&mut server.limits);
    let mut pair = Pair::new(settings("/job:worker/task:0", 1), server);
    pair.run();
    pair
}

pub fn assert_healthy(pair: &Pair) {
    assert_eq!(pair.client.error, None);
    assert_eq!(pair.server.error, None);
}

#[test]
fn p01_requests_and_replies_travel() {
    let mut pair = Pair::ready();
    let recv = pair.recv(KEY);
    let small = vec![bytes_of(1, 100), Vec::new(), bytes_of(2, 8000)];
    let large = vec![bytes_of(3, 8192), bytes_of(4, 5), bytes_of(5, 9_000_001), Vec::new()];
    let first = pair.call(3, b"meta", Some(small.clone()), None);
    let second = pair.call(4, b"", Some(large.clone()), Some(Duration::from_millis(1500)));
    pair.run();
    assert_healthy(&pair);
    let recv_request = Request::Recv { id: recv, step: 7, prefix: KEY.to_vec(), frame: 0, iter: 0 };
    assert!(pair.server.owner.requests.contains(&recv_request));
    let (meta, parts) = (b"meta".to_vec(), small.clone());
    let call = Request::Call { id: first, method: 3, deadline_ms: 0, meta, parts };
    assert!(pair.server.owner.requests.contains(&call));
    let call = Request::Call { id: second, method: 4, deadline_ms: 1500, meta: Vec::new(), parts: large.clone() };
    assert!(pair.server.owner.requests.contains(&call));
    assert_eq!(pair.client.payloads.get(), 0);

    pair.reply(recv, 0, b"dtype", Some(large.clone()));
    pair.reply(first, 0, b"", None);
    pair.reply(second, 9, b"not now", Some(vec![bytes_of(9, 10_000)]));
    pair.run();
    let ended = &pair.client.owner.ended;
    assert_eq!(ended[&recv], Ended::Ok { meta: b"dtype".to_vec(), parts: large });
    assert_eq!(ended[&first], Ended::Ok { meta: Vec::new(), parts: Vec::new() });
    let details = bytes_of(9, 10_000);
    assert_eq!(ended[&second], Ended::Peer { code: 9, message: "not now".to_owned(), details });
    assert_eq!(pair.server.payloads.get(), 0);
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}

#[test]
fn p02_payloads_of_every_shape_arrive_unchanged_however_the_bytes_are_cut() {
    for (seed, max) in [(1, 1), (2, 7), (3, 1000), (4, 5000), (5, 65_536), (6, usize::MAX)] {
        let mut pair = Pair::ready();
        let shapes = [
            vec![],
            vec![0],
            vec![8191],
            vec![8192],
            vec![0, 8192, 0, 1, 20_000],
            vec![1; 700],
            vec![8192; 3],
            vec![8191; 140],
        ];
        for (number, shape) in shapes.iter().enumerate() {
            let parts: Vec<_> = shape.iter().map(|&len| bytes_of(seed + number as u64, len)).collect();
            let id = pair.call(9, b"m", Some(parts.clone()), None);
            while pair.client.send(pair.now, &mut pair.to_server) {}
            pair.deliver(max);
            assert_healthy(&pair);
            let Some(Request::Call { parts: arrived, .. }) = pair.server.owner.take_request(id) else {
                panic!("shape {number} did not arrive with cuts of {max}");
            };
            assert_eq!(arrived, parts);
            pair.reply(id, 0, b"r", Some(parts.clone()));
            while pair.server.send(pair.now, &mut pair.to_client) {}
            pair.deliver(max);
            assert_eq!(pair.client.owner.ended[&id], Ended::Ok { meta: b"r".to_vec(), parts });
        }
        assert_eq!((pair.client.payloads.get(), pair.server.payloads.get()), (0, 0));
        assert_eq!(pair.server.owner.bodies.get(), 0);
    }
}

#[test]
fn p02_a_payload_of_very_many_bulk_parts_takes_several_blocks_and_plans() {
    let mut pair = Pair::ready();
    let parts: Vec<_> = (0..1700).map(|n| bytes_of(n, 8192 + (n as usize % 3))).collect();
    let id = pair.call(1, b"", Some(parts.clone()), None);
    pair.run();
    assert_healthy(&pair);
    assert!(pair.client.blocks.len() >= 4);
    let Some(Request::Call { parts: arrived, .. }) = pair.server.owner.take_request(id) else { panic!("lost") };
    assert!(arrived == parts);
}

#[test]
fn p03_a_cancelled_receive_ends_only_when_its_buffers_are_free() {
    let _reached = starwire_marks::expect("a reply is cancelled while its buffers are written to");
    let mut pair = Pair::ready();
    let id = pair.recv(KEY);
    pair.run();
    pair.reply(id, 0, b"", Some(vec![bytes_of(1, 100_000)]));
    while pair.server.send(pair.now, &mut pair.to_client) {}
    // The head and some bytes of the payload.
    let first = pair.to_client.len() - 100_000 + 500;
    for _ in 0..10 {
        assert!(pair.client.begin_receive());
        let arrived = 100_000 + first - pair.to_client.len().min(100_000 + first);
        if arrived >= first {
            break;
        }
        pair.client.finish_receive(pair.now, &mut pair.to_client, first.min(1500));
    }
    assert!(pair.client.begin_receive(), "a receive into the op's buffers is in flight");
    pair.cancel(id);
    assert!(!pair.client.owner.ended.contains_key(&id), "its buffers are still written to");
    pair.client.finish_receive(pair.now, &mut pair.to_client, 10);
    assert!(matches!(pair.client.owner.ended[&id], Ended::Local { code: 1, .. }));
    pair.run();
    assert_healthy(&pair);
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}

#[test]
fn p04_large_parts_are_not_copied_in_user_space() {
    let mut pair = Pair::ready();
    let id = pair.call(2, b"", Some(vec![bytes_of(1, 8192), bytes_of(2, 3_000_000)]), None);
    pair.run();
    pair.reply(id, 0, b"", Some(vec![bytes_of(3, 5_000_000)]));
    pair.run();
    for end in [&pair.client, &pair.server] {
        let stats = end.connection.stats();
        assert_eq!((stats.copied_in, stats.copied_out), (0, 0));
        assert_eq!(stats.payload_in + stats.payload_out, 8_008_192);
    }
}

#[test]
fn p05_requests_of_one_round_share_a_block_and_keys_travel_once() {
    let mut pair = Pair::ready();
    pair.recv(KEY);
    pair.run();
    pair.client.blocks.clear();
    for _ in 0..100 {
        pair.recv(KEY);
    }
    pair.run();
    // 32 bytes each with a known key.
    assert_eq!(pair.client.blocks, [(32 + 100 * 32, 0)]);
    // Within a loop, frame and iteration follow.
    pair.client.blocks.clear();
    let id = pair.id();
    pair.client.recv(pair.now, Recv { id, step: 7, prefix: KEY, frame: 1, iter: 1, deadline: None, op: () });
    pair.run();
    assert_eq!(pair.client.blocks, [(32 + 48, 0)]);
    assert_eq!(pair.client.connection.stats().keys, 1);
    assert_eq!(pair.server.owner.requests.len(), 102);
    let ids: Vec<u64> = pair.server.owner.requests.iter().map(Request::id).collect();
    pair.server.blocks.clear();
    for id in ids {
        pair.reply(id, 0, b"", Some(vec![vec![1; 8]]));
    }
    pair.run();
    assert_eq!(pair.server.blocks.len(), 1);
}

#[test]
fn p06_small_frames_overtake_large_payloads() {
    let mut pair = Pair::ready();
    let large = pair.recv(KEY);
    let small = pair.recv(KEY);
    let middle = pair.recv(KEY);
    pair.run();
    pair.reply(large, 0, b"", Some(vec![bytes_of(1, 40 << 20)]));
    pair.server.send(pair.now, &mut pair.to_client);
    pair.reply(small, 0, b"", Some(vec![bytes_of(2, 10)]));
    pair.reply(middle, 0, b"", Some(vec![bytes_of(3, 100_000)]));
    pair.server.send(pair.now, &mut pair.to_client);
    pair.deliver(usize::MAX);
    assert!(pair.client.owner.ended.contains_key(&small) && pair.client.owner.ended.contains_key(&middle));
    assert!(!pair.client.owner.ended.contains_key(&large));
    pair.run();
    assert!(pair.client.owner.ended.contains_key(&large));
    assert!(pair.server.blocks.iter().all(|block| block.1 <= BULK_SOFT));
    // Bulk bytes never come within the first read of a block.
    assert!(pair.server.blocks.iter().all(|block| block.1 == 0 || block.0 >= FIRST_READ));
}

#[test]
fn p06_larger_payloads_have_a_quarter_of_each_block() {
    let mut pair = Pair::ready();
    let small: Vec<u64> = (0..40).map(|_| pair.recv(KEY)).collect();
    let large = pair.recv(KEY);
    pair.run();
    for id in small {
        pair.reply(id, 0, b"", Some(vec![bytes_of(id, 200_000)]));
    }
    pair.reply(large, 0, b"", Some(vec![bytes_of(1, 2 << 20)]));
    pair.server.blocks.clear();
    // Small ones alone would fill the first two blocks; they leave a quarter of both.
    for _ in 0..2 {
        assert!(pair.server.send(pair.now, &mut pair.to_client));
    }
    assert_eq!(pair.server.blocks.iter().map(|block| block.1).collect::<Vec<_>>(), [BULK_SOFT, BULK_SOFT]);
    pair.deliver(usize::MAX);
    assert!(matches!(&pair.client.owner.ended[&large], Ended::Ok { parts, .. } if parts[0].len() == 2 << 20));
    let small_ones = pair.client.owner.ended.len() - 1;
    assert_eq!(small_ones, 2 * (3 << 20) / 200_000, "they have the rest");
    pair.run();
    assert_eq!(pair.client.owner.ended.len(), 41);
    assert_healthy(&pair);
}

#[test]
fn p06_a_block_takes_no_further_frames_once_it_is_long() {
    let mut pair = Pair::ready();
    for _ in 0..1000 {
        pair.call(1, &[7; 1000], None, None);
    }
    pair.client.blocks.clear();
    pair.run();
    assert_healthy(&pair);
    assert_eq!(pair.server.owner.requests.len(), 1000);
    let longest = pair.client.blocks.iter().map(|block| block.0).max();
    assert!(longest.is_some_and(|bytes| bytes > 256 << 10 && bytes < (256 << 10) + 1100), "{longest:?}");
    // Except for a single one.
    let id = pair.call(1, &vec![7; 1 << 20], None, None);
    pair.run();
    assert!(pair.server.owner.take_request(id).is_some());
}

#[test]
fn p07_the_client_keeps_the_servers_limits_and_nothing_is_lost() {
    let _reached = starwire_marks::expect("requests wait for the peer's limits");
    let mut pair = limited(|limits| {
        limits.max_recvs = 3;
        limits.max_calls = 2;
        limits.max_call_bytes = 50_000;
    });
    let mut open: Vec<u64> = (0..20).map(|_| pair.recv(KEY)).collect();
    open.extend((0..9).map(|n| pair.call(1, b"", Some(vec![bytes_of(n, 30_000)]), None)));
    open.extend((0..9).map(|_| pair.call(1, b"", None, None)));
    let mut rounds = 0;
    while !open.is_empty() {
        pair.run();
        assert_healthy(&pair);
        let requests = std::mem::take(&mut pair.server.owner.requests);
        let recvs = requests.iter().filter(|request| matches!(request, Request::Recv { .. })).count();
        let bytes: usize = requests
            .iter()
            .map(|request| match request {
                Request::Call { parts, .. } => parts.iter().map(Vec::len).sum(),
                Request::Recv { .. } => 0,
            })
            .sum();
        assert!(recvs <= 3 && requests.len() - recvs <= 2 && bytes <= 50_000);
        for request in requests {
            pair.reply(request.id(), 0, b"", None);
        }
        pair.run();
        open.retain(|id| !pair.client.owner.ended.contains_key(id));
        rounds += 1;
        assert!(rounds < 50);
    }
}

#[test]
fn p08_a_call_larger_than_the_window_goes_alone() {
    let mut pair = limited(|limits| limits.max_call_bytes = 10_000);
    let parts = vec![bytes_of(1, 1_000_000)];
    let (first, second) = (pair.call(1, b"", Some(parts.clone()), None), pair.call(1, b"", Some(parts.clone()), None));
    let light = pair.call(1, b"", None, None);
    pair.run();
    assert_healthy(&pair);
    let ids: Vec<u64> = pair.server.owner.requests.iter().map(Request::id).collect();
    assert!(ids.contains(&first) && ids.contains(&light) && !ids.contains(&second));
    pair.reply(first, 0, b"", None);
    pair.run();
    assert!(pair.server.owner.requests.iter().any(|request| request.id() == second));
    assert_healthy(&pair);
}

#[test]
fn p08_a_cancelled_call_makes_room_for_the_next_at_once() {
    let _reached = starwire_marks::expect("a call is cancelled before any of it was sent");
    let mut pair = limited(|limits| limits.max_call_bytes = 10_000);
    let parts = || Some(vec![bytes_of(1, 10_000)]);
    let (first, second) = (pair.call(1, b"", parts(), None), pair.call(1, b"", parts(), None));
    pair.cancel(first);
    pair.run();
    let ids: Vec<u64> = pair.server.owner.requests.iter().map(Request::id).collect();
    assert_eq!(ids, [second]);
    assert_healthy(&pair);
}

#[test]
fn p08_a_call_that_waits_and_is_cancelled_holds_nothing_up() {
    let mut pair = limited(|limits| limits.max_call_bytes = 10_000);
    let parts = |bytes| Some(vec![bytes_of(1, bytes)]);
    let first = pair.call(1, b"", parts(8000), None);
    let large = pair.call(1, b"", parts(9000), None);
    let late = pair.call(1, b"", parts(9000), Some(Duration::from_millis(300)));
    let small = pair.call(1, b"", parts(1000), None);
    pair.run();
    pair.cancel(large);
    pair.advance(Duration::from_millis(300));
    pair.run();
    assert!(matches!(pair.client.owner.ended[&late], Ended::Local { code: 4, .. }));
    let ids: Vec<u64> = pair.server.owner.requests.iter().map(Request::id).collect();
    assert_eq!(ids, [first, small], "it fits");
    assert_healthy(&pair);
}

#[test]
fn p09_a_deadline_ends_the_call_and_tells_the_server() {
    let mut pair = Pair::ready();
    let id = pair.call(5, b"", None, Some(Duration::from_millis(300)));
    pair.run();
    pair.advance(Duration::from_millis(299));
    assert!(pair.client.owner.ended.is_empty());
    pair.advance(Duration::from_millis(1));
    let Ended::Local { code, message } = &pair.client.owner.ended[&id] else { panic!("not ended here") };
    assert_eq!(*code, 4);
    assert!(message.contains("/job:ps/task:0"), "{message}");
    pair.run();
    assert_eq!(pair.server.owner.cancelled, [(id, 5, 0, false)]);
    let late = pair.call(5, b"", None, Some(Duration::ZERO));
    assert!(matches!(pair.client.owner.ended[&late], Ended::Local { code: 4, .. }));
    pair.run();
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}

#[test]
fn p09_a_deadline_ends_a_request_that_waits_for_the_handshake() {
    let mut pair = Pair::new(settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
    let id = pair.call(5, b"", None, Some(Duration::from_millis(300)));
    pair.advance(Duration::from_millis(300));
    assert!(matches!(pair.client.owner.ended[&id], Ended::Local { code: 4, .. }));
}

#[test]
fn p10_cancel_ends_the_request_everywhere_and_late_answers_are_ignored() {
    let _reached = starwire_marks::expect("a cancellation crosses its answer");
    let mut pair = Pair::ready();
    let recv = pair.recv(KEY);
    let call = pair.call(8, b"", Some(vec![bytes_of(1, 100)]), None);
    pair.run();
    pair.cancel(recv);
    pair.cancel(call);
    pair.cancel(call);
    pair.cancel(4711);
    assert!(pair.client.owner.ended.values().all(|ended| matches!(ended, Ended::Local { code: 1, .. })));
    assert_eq!(pair.client.owner.ended.len(), 2);
    // An answer that crosses the cancellation is ignored by the client …
    pair.reply(recv, 0, b"", Some(vec![bytes_of(2, 50_000)]));
    pair.run();
    // … and one that comes later by the server.
    pair.reply(call, 0, b"", Some(vec![bytes_of(2, 50_000)]));
    pair.run();
    assert_healthy(&pair);
    assert_eq!(pair.server.owner.cancelled, [(call, 8, 0, false)]);
    assert_eq!(pair.server.payloads.get(), 0);
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}

#[test]
fn p10_a_cancelled_payload_stops_travelling() {
    let _reached = starwire_marks::expect("a reply is cancelled while it is sent");
    let mut pair = Pair::ready();
    // Client to server.
    let call = pair.call(8, b"", Some(vec![bytes_of(1, 40 << 20)]), None);
    pair.client.send(pair.now, &mut pair.to_server);
    pair.deliver(usize::MAX);
    pair.cancel(call);
    assert_eq!(pair.client.payloads.get(), 0);
    pair.run();
    assert!(pair.client.connection.stats().payload_out < 5 << 20);
    assert_eq!(pair.server.owner.bodies.get(), 0, "the half received payload is dropped");
    // Server to client.
    let recv = pair.recv(KEY);
    pair.run();
    pair.reply(recv, 0, b"", Some(vec![bytes_of(2, 40 << 20)]));
    pair.server.send(pair.now, &mut pair.to_client);
    pair.deliver(usize::MAX);
    pair.cancel(recv);
    pair.client.send(pair.now, &mut pair.to_server);
    pair.deliver(usize::MAX);
    assert_eq!(pair.server.payloads.get(), 0);
    pair.run();
    assert!(pair.server.connection.stats().payload_out < 5 << 20);
    assert_healthy(&pair);
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}

#[test]
fn p11_a_silent_peer_is_noticed_and_a_quiet_one_is_not() {
    let mut pair = Pair::ready();
    // Quiet: the peer answers pings.
    for _ in 0..100 {
        pair.advance(Duration::from_millis(500));
        pair.run();
    }
    assert_healthy(&pair);
    assert!(pair.client.connection.stats().pings_sent > 10);
    // Silent: 1 s interval + 3 s.
    let mut waited = Duration::ZERO;
    while pair.client.error.is_none() {
        pair.advance(Duration::from_millis(100));
        while pair.client.send(pair.now, &mut pair.to_server) {}
        waited += Duration::from_millis(100);
        assert!(waited <= Duration::from_millis(4200));
    }
    assert!(
        matches!(pair.client.error, Some(ConnectionError::PeerSilent { waited }) if (3900..=4200).contains(&waited.as_millis()))
    );
}

#[test]
fn p11_a_stall_of_our_own_is_not_taken_for_the_peers_silence() {
    let mut pair = Pair::ready();
    pair.advance(Duration::from_secs(1));
    while pair.client.send(pair.now, &mut pair.to_server) {}
    // The answer lies in the socket while this process is stopped for a while.
    pair.advance(Duration::from_secs(20));
    pair.run();
    assert_healthy(&pair);
    pair.advance(Duration::from_millis(100));
    pair.run();
    assert_healthy(&pair);
}

/// A PING of the client is on its way, or its PONG, when the machine stalls, however long.
#[test]
fn p11_a_stall_of_both_sides_is_not_taken_for_silence() {
    const STEP: u64 = 50;
    for stall in (100..9000).step_by(130) {
        for slow in (0..1500).step_by(130) {
            let mut pair = Pair::ready();
            for _ in 0..(1000 + slow) / STEP {
                pair.advance(Duration::from_millis(STEP));
                while pair.client.send(pair.now, &mut pair.to_server) {}
            }
            pair.advance(Duration::from_millis(stall));
            for _ in 0..100 {
                pair.advance(Duration::from_millis(STEP));
                pair.run();
            }
            assert!(pair.client.error.is_none() && pair.server.error.is_none(), "{slow} {stall}");
        }
    }
}

#[test]
fn p11_a_peer_that_takes_bytes_is_not_silent() {
    let mut pair = Pair::ready();
    // So much is on its way to the client that no PING reaches it.
    for _ in 0..100 {
        pair.advance(Duration::from_millis(100));
        pair.server.connection.progressed(pair.now);
    }
    assert_eq!(pair.server.error, None);
    // It takes nothing more: 1 s interval + 3 s.
    let mut waited = Duration::ZERO;
    while pair.server.error.is_none() {
        pair.advance(Duration::from_millis(100));
        waited += Duration::from_millis(100);
        assert!(waited <= Duration::from_millis(4200));
    }
}

#[test]
fn p12_a_malformed_key_refuses_its_requests_only() {
    let mut pair = Pair::ready();
    let (bad, good) = (pair.recv(BAD_PREFIX), pair.recv(KEY));
    let again = pair.recv(BAD_PREFIX);
    pair.run();
    assert_healthy(&pair);
    for id in [bad, again] {
        assert!(matches!(pair.client.owner.ended[&id], Ended::Peer { code: 3, .. }));
    }
    assert_eq!(pair.server.owner.requests.len(), 1);
    assert_eq!(pair.server.owner.requests[0].id(), good);
    let long = pair.recv(&[b'x'; 4097]);
    assert!(matches!(pair.client.owner.ended[&long], Ended::Local { code: 3, .. }));
}

#[test]
fn p13_the_key_table_is_bounded_and_starts_again_when_full() {
    let _reached = starwire_marks::expect("a full key table starts again");
    let mut pair = limited(|limits| limits.max_keys = 10);
    for n in 0..95 {
        let prefix = format!("key {}", n % 31);
        let id = pair.recv(prefix.as_bytes());
        pair.run();
        assert_healthy(&pair);
        let Some(Request::Recv { prefix: seen, .. }) = pair.server.owner.take_request(id) else { panic!("lost") };
        assert_eq!(seen, prefix.as_bytes());
        assert!(pair.server.owner.keys.len() <= 10);
    }
    assert_eq!(pair.server.owner.keys_forgotten, 9);
}

#[test]
fn p14_a_refused_payload_is_not_sent_to_its_end() {
    let mut pair = Pair::ready();
    let call = pair.call(REFUSED_METHOD, b"", Some(vec![bytes_of(1, 40 << 20)]), None);
    // Both sides work at once: the refusal meets a payload on its way.
    while !pair.client.owner.ended.contains_key(&call) {
        assert!(pair.client.send(pair.now, &mut pair.to_server));
        pair.deliver(usize::MAX);
        pair.server.send(pair.now, &mut pair.to_client);
        pair.deliver(usize::MAX);
    }
    let Ended::Peer { code: 12, message, .. } = &pair.client.owner.ended[&call] else { panic!("not refused") };
    assert_eq!(message, "no such method");
    pair.run();
    assert!(pair.client.connection.stats().payload_out < 10 << 20);
    assert_eq!(pair.client.payloads.get(), 0);

    let recv = pair.recv(KEY);
    pair.run();
    pair.reply(recv, 0, REFUSED_META, Some(vec![bytes_of(2, 40 << 20)]));
    pair.server.send(pair.now, &mut pair.to_client);
    pair.deliver(usize::MAX);
    let Ended::Local { code: 8, message } = &pair.client.owner.ended[&recv] else { panic!("not refused") };
    assert!(message.contains("no memory"));
    pair.client.send(pair.now, &mut pair.to_server);
    pair.deliver(usize::MAX);
    pair.run();
    assert!(pair.server.connection.stats().payload_out < 10 << 20);
    assert_healthy(&pair);
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}

#[test]
fn p15_a_server_whose_answers_pile_up_stops_reading_and_goes_on_later() {
    let mut pair = Pair::ready();
    let ids: Vec<u64> = (0..4000).map(|_| pair.recv(KEY)).collect();
    pair.run();
    let payload = vec![vec![5; 8000]];
    for id in &ids {
        pair.reply(*id, 0, b"", Some(payload.clone()));
    }
    assert!(!pair.server.begin_receive(), "the server does not read");
    // What is beyond the high-water mark lies where it lay.
    assert!(pair.server.payloads.get() > 2500);
    let more = pair.recv(KEY);
    pair.run();
    assert_healthy(&pair);
    assert_eq!(pair.client.owner.ended.len(), 4000);
    assert!(pair.server.owner.requests.iter().any(|request| request.id() == more));
    assert_eq!(pair.server.payloads.get(), 0);
}

#[test]
fn p15_a_server_with_many_bytes_of_answers_stops_reading_and_goes_on_later() {
    for (answers, reads) in [(6, true), (7, false)] {
        let mut pair = Pair::ready();
        let ids: Vec<u64> = (0..answers).map(|_| pair.recv(KEY)).collect();
        pair.run();
        for id in &ids {
            pair.reply(*id, 0, b"", Some(vec![vec![5; 40 << 20]]));
        }
        assert_eq!(pair.server.begin_receive(), reads, "{answers} answers of 40 MB");
        let more = pair.recv(KEY);
        pair.run();
        assert_healthy(&pair);
        assert_eq!(pair.client.owner.ended.len(), answers);
        assert!(pair.server.owner.requests.iter().any(|request| request.id() == more));
        assert_eq!(pair.server.payloads.get(), 0);
    }
}

#[test]
fn p16_goodbye_refuses_new_requests_and_lets_old_ones_end() {
    let _reached = starwire_marks::expect("a request meets a server that drains");
    let mut pair = Pair::ready();
    let old = pair.recv(KEY);
    pair.run();
    let crossing = pair.recv(KEY);
    pair.server.goodbye("maintenance");
    pair.run();
    assert!(
        matches!(&pair.client.owner.ended[&crossing], Ended::Peer { code: 14, message, .. } if message == "maintenance")
    );
    assert_eq!(pair.client.owner.goodbyes, ["maintenance"]);
    let new = pair.recv(KEY);
    let Ended::Local { code: 14, message } = &pair.client.owner.ended[&new] else { panic!("not refused") };
    assert!(message.contains("maintenance") && message.contains("/job:ps/task:0"), "{message}");
    pair.reply(old, 0, b"last", None);
    pair.run();
    assert_eq!(pair.client.owner.ended[&old], Ended::Ok { meta: b"last".to_vec(), parts: Vec::new() });
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}

#[test]
fn p16_what_waits_to_be_sent_is_lost_when_the_peer_leaves() {
    let parts = || Some(vec![bytes_of(1, 10_000)]);
    let waiting = || {
        let mut pair = limited(|limits| limits.max_call_bytes = 10_000);
        let (sent, waits) = (pair.call(1, b"", parts(), None), pair.call(1, b"", parts(), None));
        pair.run();
        assert!(pair.client.owner.ended.is_empty());
        (pair, sent, waits)
    };
    let (mut pair, sent, waits) = waiting();
    pair.server.connection.leave("the server was stopped");
    pair.run();
    let Ended::Local { code: 14, message } = &pair.client.owner.ended[&waits] else { panic!("it waits on") };
    assert!(message.contains("the server was stopped") && message.contains("/job:ps/task:0"), "{message}");
    pair.client.fail(14, "the peer is gone");
    assert_eq!(pair.client.owner.lost, [sent, waits].into());
    // This side knows that the call was not sent.
    let (mut pair, _, waits) = waiting();
    pair.client.goodbye("no more");
    assert!(pair.client.owner.ended.contains_key(&waits) && pair.client.owner.lost.is_empty());
}

#[test]
fn p17_failure_ends_everything_on_both_sides() {
    let mut pair = Pair::ready();
    let recv = pair.recv(KEY);
    let call = pair.call(6, b"", None, Some(Duration::from_secs(60)));
    pair.run();
    let large = pair.call(7, b"", Some(vec![bytes_of(1, 20 << 20)]), None);
    pair.client.send(pair.now, &mut pair.to_server);
    pair.deliver(usize::MAX);
    assert_eq!(pair.server.owner.bodies.get(), 1);
    pair.client.fail(14, "connection reset");
    pair.server.fail(14, "connection reset");
    for id in [recv, call, large] {
        let message = "connection reset".to_owned();
        assert_eq!(pair.client.owner.ended[&id], Ended::Local { code: 14, message });
    }
    assert_eq!(pair.server.owner.cancelled, [(recv, 0, 7, true), (call, 6, 0, true)]);
    assert_eq!(pair.client.payloads.get(), 0);
    assert_eq!(pair.server.owner.bodies.get(), 0);
    // Afterwards nothing is accepted, nothing is sent, nothing happens twice.
    let late = pair.recv(KEY);
    assert!(matches!(pair.client.owner.ended[&late], Ended::Local { code: 14, .. }));
    pair.reply(recv, 0, b"", None);
    pair.client.fail(1, "again");
    pair.run();
    assert_eq!(pair.client.connection.next_timeout(), None);
    assert!(!pair.server.begin_receive());
}

#[test]
fn p18_what_cannot_be_sent_is_refused_here() {
    let mut pair = limited(|limits| limits.max_payload = 1 << 20);
    let long_meta = pair.call(1, &vec![0; (1 << 20) + 1], None, None);
    let no_method = pair.call(0, b"", None, None);
    let parts = pair.call(1, b"", Some(vec![Vec::new(); 65_537]), None);
    for id in [long_meta, no_method, parts] {
        assert!(matches!(pair.client.owner.ended[&id], Ended::Local { code: 3, .. }));
    }
    let large = pair.call(1, b"", Some(vec![vec![0; (1 << 20) + 1]]), None);
    assert!(matches!(pair.client.owner.ended[&large], Ended::Local { code: 8, .. }));
    let fits = pair.call(1, &vec![1; 1 << 20], Some(vec![vec![0; 1 << 20]]), None);
    pair.run();
    assert_healthy(&pair);
    pair.reply(fits, 0, &vec![0; (1 << 20) + 1], None);
    pair.run();
    assert!(matches!(pair.client.owner.ended[&fits], Ended::Peer { code: 8, .. }));
}

#[test]
fn p19_a_flood_of_pings_costs_one_pong() {
    let mut peer = RawPeer::welcomed(settings("/job:ps/task:0", 2));
    peer.listen();
    for nonce in 0..1000 {
        peer.say(&[wire::RawFrame::new(wire::PING, nonce)]);
    }
    assert_eq!(peer.listen_frames(), [(wire::PONG, 999)]);
}

#[test]
fn what_a_peer_is_told_is_cut_to_its_limit() {
    // Within a letter of two bytes.
    let (long, cut) = (format!("a{}", "é".repeat(70_000)), |bytes: usize| format!("a{}", "é".repeat(bytes / 2)));
    let mut pair = Pair::ready();
    let ids: Vec<u64> = (0..2).map(|_| pair.recv(KEY)).collect();
    pair.run();
    pair.reply(ids[0], 9, long.as_bytes(), Some(vec![bytes_of(1, 64 << 10)]));
    pair.reply(ids[1], 9, b"short", Some(vec![bytes_of(1, (64 << 10) + 1)]));
    pair.run();
    let (message, details) = (cut((64 << 10) - 2), bytes_of(1, 64 << 10));
    assert_eq!(pair.client.owner.ended[&ids[0]], Ended::Peer { code: 9, message, details });
    let (message, details) = ("short".to_owned(), Vec::new());
    assert_eq!(pair.client.owner.ended[&ids[1]], Ended::Peer { code: 9, message, details });

    pair.client.goodbye(&long);
    pair.run();
    assert_eq!(pair.server.owner.goodbyes, [cut(1022)]);
    assert_healthy(&pair);
}
