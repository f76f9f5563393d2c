//! Promises about payloads that are lent instead of being sent. Addresses are those of `owner::MEMORY`, which forgets a
//! payload with its last holder.

use starwire_protocol::limits::{LEND_MIN, MOST_LOANS};
use starwire_protocol::{ConnectionError, FEATURE_LENDING, ProtocolError};

use crate::owner::{Ended, REFUSED_METHOD, Request};
use crate::pair::{End, Pair, settings};
use crate::promises::KEY;
use crate::random::bytes_of;
use crate::wire::{BULK, HELLO, LEND, RawFrame, RawPeer, TAKEN, call, data, fields};

fn assert_healthy(pair: &Pair) {
    assert_eq!((&pair.client.error, &pair.server.error), (&None, &None));
    assert_eq!((pair.client.payloads.get(), pair.server.payloads.get()), (0, 0));
    assert!(pair.client.connection.is_idle() && pair.server.connection.is_idle());
}

#[test]
fn p33_large_payloads_between_neighbours_do_not_travel() {
    let mut pair = Pair::of_neighbours();
    let parts = vec![bytes_of(1, 3), bytes_of(2, 200_000), bytes_of(3, 9_000_001), Vec::new(), bytes_of(4, 8192)];
    let id = pair.call(3, b"meta", Some(parts.clone()), None);
    let recv = pair.recv(KEY);
    pair.run();
    let Some(Request::Call { parts: arrived, .. }) = pair.server.owner.take_request(id) else { panic!("no call") };
    assert!(arrived == parts);
    pair.reply(id, 0, b"", Some(parts.clone()));
    pair.reply(recv, 0, b"", Some(vec![bytes_of(5, 1 << 20)]));
    pair.run();
    assert!(matches!(&pair.client.owner.ended[&id], Ended::Ok { parts: answer, .. } if *answer == parts));
    assert!(matches!(&pair.client.owner.ended[&recv], Ended::Ok { parts, .. } if *parts == [bytes_of(5, 1 << 20)]));
    let (client, server) = (*pair.client.connection.stats(), *pair.server.connection.stats());
    assert_eq!((client.lent, server.lent), (9_208_193, 9_208_193 + (1 << 20)));
    assert_eq!((client.borrowed, server.borrowed), (server.lent, client.lent));
    assert!(client.bytes_out < 20_000 && server.bytes_out < 20_000, "{client:?} {server:?}");
    assert_healthy(&pair);
}

#[test]
fn p15_a_server_that_lends_stops_reading_later() {
    for (answers, reads) in [(3, true), (4, false)] {
        let mut pair = Pair::of_neighbours();
        let ids: Vec<u64> = (0..answers).map(|_| pair.recv(KEY)).collect();
        pair.run();
        for id in &ids {
            pair.reply(*id, 0, b"", Some(vec![vec![0; 256 << 20]]));
        }
        assert_eq!(pair.server.begin_receive(), reads, "{answers} answers of 256 MiB");
        ids.iter().for_each(|id| pair.client.cancel(pair.now, *id, "cancelled"));
        pair.run();
        assert_healthy(&pair);
        assert!(pair.server.begin_receive());
    }
}

#[test]
fn p33_small_payloads_travel() {
    let mut pair = Pair::of_neighbours();
    pair.call(3, b"", Some(vec![bytes_of(1, LEND_MIN as usize - 1)]), None);
    pair.run();
    let stats = pair.client.connection.stats();
    assert!(stats.lent == 0 && stats.bytes_out > LEND_MIN);
}

#[test]
fn p33_what_is_lent_is_kept_until_it_was_taken() {
    let mut pair = Pair::of_neighbours();
    let id = pair.call(3, b"", Some(vec![bytes_of(1, 1 << 20)]), None);
    assert!(pair.client.send(pair.now, &mut pair.to_server));
    // Nobody wants it any more, but the peer does not know yet.
    pair.client.cancel(pair.now, id, "cancelled");
    assert!(pair.client.owner.ended.contains_key(&id));
    assert_eq!(pair.client.payloads.get(), 1);
    assert!(!pair.client.connection.is_idle());
    pair.deliver(usize::MAX);
    assert_eq!(pair.client.payloads.get(), 1, "the peer has it, and has not said so");
    pair.run();
    assert_healthy(&pair);
    // Nor does it go with the connection's end: only when its owner says that nobody can mistake other memory for it.
    pair.call(3, b"", Some(vec![bytes_of(1, 1 << 20)]), None);
    assert!(pair.client.send(pair.now, &mut pair.to_server));
    pair.client.connection.fail(14, "lost");
    pair.client.poll_events();
    assert_eq!(pair.client.payloads.get(), 1);
    pair.client.connection.take_back();
    assert_eq!(pair.client.payloads.get(), 0);
}

#[test]
fn p33_nothing_is_lent_to_who_cannot_read_or_does_not_know_how() {
    for (client, server, reads) in
        [(FEATURE_LENDING, 0, true), (0, FEATURE_LENDING, true), (FEATURE_LENDING, FEATURE_LENDING, false)]
    {
        let (mut a, mut b) = (settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
        (a.features, b.features) = (client, server);
        let mut pair = Pair::new(a, b);
        End::make_neighbours(&mut pair.client, &mut pair.server);
        (pair.client.reads_peer, pair.server.reads_peer) = (reads, false);
        pair.run();
        let id = pair.call(3, b"", Some(vec![bytes_of(1, 1 << 20)]), None);
        pair.run();
        assert_eq!(pair.client.connection.stats().lent, 0, "{client} {server} {reads}");
        pair.reply(id, 0, b"", Some(vec![bytes_of(2, 1 << 20)]));
        pair.run();
        assert_eq!(pair.server.connection.stats().lent, 0, "{client} {server} {reads}");
        assert_healthy(&pair);
    }
}

#[test]
fn p33_what_nobody_wants_is_passed_over() {
    let mut pair = Pair::of_neighbours();
    let refused = pair.call(REFUSED_METHOD, b"", Some(vec![bytes_of(1, 40 << 20)]), None);
    let wanted = pair.call(4, b"", Some(vec![bytes_of(2, 300_000)]), None);
    pair.run();
    assert!(matches!(pair.client.owner.ended[&refused], Ended::Peer { code: 12, .. }));
    let Some(Request::Call { parts, .. }) = pair.server.owner.take_request(wanted) else { panic!("no call") };
    assert!(parts == [bytes_of(2, 300_000)]);
    pair.server.connection.reply(wanted, 0, b"", None);
    pair.run();
    assert_healthy(&pair);
}

#[test]
fn p33_a_peer_that_takes_nothing_is_lent_no_more() {
    let mut pair = Pair::of_neighbours();
    for seed in 0..MOST_LOANS as u64 + 10 {
        pair.call(3, b"", Some(vec![bytes_of(seed, 300_000)]), None);
        assert!(pair.client.send(pair.now, &mut pair.to_server));
    }
    let stats = *pair.client.connection.stats();
    assert_eq!(stats.lent, MOST_LOANS as u64 * 300_000);
    assert!(stats.bytes_out > 10 * 300_000, "{stats:?}");
    pair.run();
    assert_eq!(pair.server.owner.requests.len(), MOST_LOANS + 10);
    assert_eq!(pair.client.payloads.get(), 0);
    assert_eq!((&pair.client.error, &pair.server.error), (&None, &None));
}

/// A server that can read the peer's memory, and said so.
fn trusting() -> RawPeer {
    let mut settings = settings("/job:ps/task:0", 2);
    settings.features = FEATURE_LENDING;
    let mut peer = RawPeer::new(End::server(settings, std::time::Instant::now()));
    peer.say(&[RawFrame::new(HELLO, FEATURE_LENDING).meta(&fields("/job:worker/task:0", &[]))]);
    peer.end.connection.allow_lending();
    peer
}

fn lend(pieces: &[u64]) -> RawFrame {
    RawFrame::new(LEND, 101).words(&[0x1000, pieces.len() as u64 / 2]).words(pieces)
}

#[test]
fn p33_loans_out_of_turn_are_protocol_errors() {
    let announced = || [call(1, &[BULK | 200_000]), data(1, 200_000)];
    let said = |frames: &[RawFrame]| {
        let mut peer = trusting();
        peer.say(frames);
        match peer.end.error {
            Some(ConnectionError::Protocol(error)) => error.to_string(),
            other => panic!("{other:?}"),
        }
    };
    let [first, second] = announced();
    for pieces in [&[4096, 199_999][..], &[4096, 200_001], &[4096, 100_000], &[]] {
        let text = said(&[first.clone(), second.clone(), lend(pieces)]);
        assert!(text.contains("claim 200000") || text.contains("not a valid range of memory"), "{pieces:?}: {text}");
    }
    for pieces in [[4096, 0, 4096, 200_000], [u64::MAX, 200_000, 1, 1], [1, u64::MAX, 1, 1]] {
        let text = said(&[first.clone(), second.clone(), lend(&pieces)]);
        assert!(text.contains("its pieces are not a valid range of memory"), "{pieces:?}: {text}");
    }
    let twice = said(&[first.clone(), second.clone(), lend(&[4096, 200_000]), lend(&[4096, 200_000])]);
    assert!(twice.contains("LEND frame is not allowed"), "{twice}");
    let too_many = said(&[RawFrame::new(LEND, 1).words(&[0x1000, 513])]);
    assert!(too_many.contains("number of pieces of a loan is 513"), "{too_many}");
    let not_lent = said(&[RawFrame::new(TAKEN, 1)]);
    assert!(not_lent.contains("it returns more blocks than were lent"), "{not_lent}");

    // Bytes and a loan in one block.
    let mut peer = trusting();
    peer.say_bulk(&[first.clone(), second.clone(), lend(&[4096, 200_000])], &vec![0; 200_000]);
    assert!(matches!(&peer.end.error, Some(ConnectionError::Protocol(ProtocolError::Frame { frame: "LEND", .. }))));
    // From somebody who was not asked, and to somebody who does not know what it is.
    for frame in [lend(&[4096, 200_000]), RawFrame::new(TAKEN, 0)] {
        let mut peer = RawPeer::welcomed(settings("/job:ps/task:0", 2));
        peer.say(&[first.clone(), second.clone(), frame]);
        let error = &peer.end.error;
        assert!(matches!(error, Some(ConnectionError::Protocol(ProtocolError::Unexpected { .. }))), "{error:?}");
    }
}

#[test]
fn p33_a_loan_is_not_empty_and_not_larger_than_a_block() {
    let large = 17 << 20;
    for frames in [vec![lend(&[])], vec![call(1, &[BULK | large]), data(1, large), lend(&[4096, large])]] {
        let mut peer = trusting();
        peer.say(&frames);
        let error = &peer.end.error;
        let is_it = matches!(error, Some(ConnectionError::Protocol(ProtocolError::Frame { frame: "LEND", .. })));
        assert!(is_it, "{error:?}");
    }
}

#[test]
fn p33_a_lost_connection_borrows_nothing() {
    let mut peer = trusting();
    peer.say(&[call(1, &[BULK | 200_000]), data(1, 200_000), lend(&[4096, 200_000])]);
    assert!(peer.end.connection.loan().is_some() && peer.end.error.is_none());
    peer.end.fail(14, "gone");
    assert!(peer.end.connection.loan().is_none());
}
