//! Promises about connections that move to a queue pair. The wires of the socket and of the queue pair are two pairs of
//! wires here.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use starwire_protocol::{ConnectionError, FEATURE_QUEUE_PAIRS, ProtocolError, Settings};

use crate::owner::Ended;
use crate::pair::{End, Pair, settings};
use crate::promises::KEY;
use crate::wire::{self, MOVE, RawFrame, RawPeer};

fn able(task: &str, nonce: u8) -> Settings {
    let mut settings = settings(task, nonce);
    settings.features = FEATURE_QUEUE_PAIRS;
    settings
}

/// A pair that has shaken hands; both can move.
fn pair() -> Pair {
    let mut pair = Pair::new(able("/job:worker/task:0", 1), able("/job:ps/task:0", 2));
    pair.run();
    assert_eq!(pair.client.owner.may_move, 1);
    assert!(pair.client.owner.ready.is_none() && !pair.client.connection.is_ready());
    assert!(pair.server.connection.is_ready());
    pair
}

/// The client has proposed, the server has heard it.
fn proposed() -> Pair {
    let mut pair = pair();
    pair.client.connection.propose_move(b"client's");
    pair.run();
    assert_eq!(pair.server.owner.proposed.as_deref(), Some(&b"client's"[..]));
    pair
}

fn is_answered(pair: &mut Pair, id: u64) {
    pair.reply(id, 0, b"meta", Some(vec![vec![9; 20_000]]));
    pair.run();
    assert_eq!(
        pair.client.owner.ended.get(&id),
        Some(&Ended::Ok { meta: b"meta".to_vec(), parts: vec![vec![9; 20_000]] })
    );
}

#[test]
fn p32_without_the_feature_on_both_sides_nothing_moves() {
    for (client, server) in [(1, 0), (0, 1), (0, 2), (2, 2)] {
        let (mut a, mut b) = (settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
        (a.features, b.features) = (client, server);
        let mut pair = Pair::new(a, b);
        pair.run();
        assert!(pair.client.connection.is_ready() && pair.client.owner.may_move == 0);
    }
}

#[test]
fn p32_a_move_takes_everything_along_and_leaves_nothing_behind() {
    let mut pair = proposed();
    pair.server.connection.accept_move(b"server's");
    // Its answer is the server's last word on the socket, whatever else it has to say.
    pair.server.goodbye("soon");
    pair.run();
    assert_eq!(pair.client.owner.answered, Some(Ok(b"server's".to_vec())));
    assert!(pair.server.connection.is_held() && !pair.server.connection.wants_transmit());
    assert!(pair.client.connection.is_held() && !pair.client.connection.wants_transmit());
    assert!(pair.client.owner.goodbyes.is_empty());
    // From here on the wires are the queue pair's.
    (pair.to_server, pair.to_client) = (VecDeque::new(), VecDeque::new());
    pair.server.connection.resume();
    pair.client.connection.moved();
    assert!(pair.client.owner.ready.is_none(), "not before the proof");
    pair.run();
    assert!(pair.client.connection.is_ready() && pair.client.owner.ready.is_some());
    assert_eq!(pair.client.owner.goodbyes, ["soon"]);
    assert_eq!((&pair.client.error, &pair.server.error), (&None, &None));
}

#[test]
fn p32_requests_flow_after_the_proof() {
    let mut pair = proposed();
    pair.server.connection.accept_move(b"server's");
    pair.run();
    pair.client.connection.moved();
    pair.server.connection.resume();
    pair.run();
    let id = pair.recv(KEY);
    pair.run();
    is_answered(&mut pair, id);
}

#[test]
fn p32_a_refused_move_leaves_the_connection_as_it_is() {
    let mut pair = proposed();
    pair.server.connection.refuse_move(9, "no device");
    pair.run();
    let answered = pair.client.owner.answered.take().expect("an answer").expect_err("no");
    assert_eq!((answered.code, answered.message.as_str()), (9, "no device"));
    pair.client.connection.stay(pair.now);
    pair.client.poll_events();
    assert!(pair.client.connection.is_ready());
    let id = pair.recv(KEY);
    pair.run();
    is_answered(&mut pair, id);
}

#[test]
fn p32_a_client_without_a_queue_pair_stays() {
    let mut pair = pair();
    pair.client.connection.stay(pair.now);
    pair.client.poll_events();
    assert!(pair.client.owner.ready.is_some());
    let id = pair.recv(KEY);
    pair.run();
    is_answered(&mut pair, id);
    assert!(pair.server.owner.proposed.is_none());
}

#[test]
fn p32_a_move_that_comes_to_nothing_ends_while_there_is_time_for_another_way() {
    let mut pair = proposed();
    pair.advance(Duration::from_millis(4_900));
    assert!(pair.client.error.is_none());
    pair.advance(Duration::from_millis(200));
    assert!(matches!(pair.client.error, Some(ConnectionError::MoveTimeout { .. })), "{:?}", pair.client.error);
}

#[test]
fn p32_a_move_out_of_turn_is_a_protocol_error() {
    let propose = || RawFrame::new(MOVE, 0).meta(b"endpoint");
    let unexpected = |peer: &RawPeer| {
        let error = &peer.end.error;
        matches!(error, Some(ConnectionError::Protocol(ProtocolError::Unexpected { frame: "MOVE", .. })))
    };
    // Not offered.
    let mut peer = RawPeer::welcomed(settings("/job:ps/task:0", 2));
    peer.say(&[propose()]);
    assert!(unexpected(&peer));
    assert!(peer.end.owner.proposed.is_none());
    // An answer to nothing.
    let mut pair = pair();
    let answer = wire::block(1, wire::section(&[propose()]), &[]);
    pair.to_client.extend(answer);
    pair.run();
    let error = &pair.client.error;
    assert!(
        matches!(error, Some(ConnectionError::Protocol(ProtocolError::Unexpected { frame: "MOVE", .. }))),
        "{error:?}"
    );
}

/// A client without a queue pair, of which the server thinks that it may move.
fn may_move() -> RawPeer {
    let mut peer = RawPeer::new(End::server(able("/job:ps/task:0", 2), Instant::now()));
    peer.say(&[RawFrame { id: FEATURE_QUEUE_PAIRS, ..wire::hello(&[]) }]);
    assert!(peer.end.connection.is_ready());
    peer.listen();
    peer
}

#[test]
fn p32_a_connection_moves_once_and_before_any_request() {
    let propose = || RawFrame::new(MOVE, 0).meta(b"endpoint");
    let request = || [wire::key(0, KEY), wire::recv(1, 0)];
    let is_refused = |peer: &RawPeer, what: &str| {
        let error = &peer.end.error;
        let unexpected = ConnectionError::Protocol(ProtocolError::Unexpected {
            frame: "MOVE",
            when: "at this point in the connection",
        });
        assert_eq!(*error, Some(unexpected), "{what}");
    };
    // Once, whether or not it was answered.
    for answers in [false, true] {
        let mut peer = may_move();
        peer.say(&[propose()]);
        assert!(peer.end.error.is_none() && peer.end.owner.proposed.take().is_some());
        if answers {
            peer.end.connection.refuse_move(9, "no device");
            peer.listen();
        }
        peer.say(&[propose()]);
        is_refused(&peer, "the second one");
        assert!(peer.end.owner.proposed.is_none());
    }
    // Before any request, whether or not it was answered.
    for answers in [false, true] {
        let mut peer = may_move();
        peer.say(&request());
        assert!(peer.end.error.is_none() && peer.end.owner.requests.len() == 1);
        if answers {
            peer.end.connection.reply(1, 0, b"", None);
            peer.listen();
        }
        peer.say(&[propose()]);
        is_refused(&peer, "after a request");
        assert!(peer.end.owner.proposed.is_none());
    }
}

#[test]
fn p32_a_move_has_its_time_and_holds_nothing_before_and_after() {
    let mut pair = proposed();
    assert!(!pair.server.connection.is_held() && pair.client.connection.is_held());
    assert_eq!(pair.client.connection.next_timeout(), Some(pair.now + Duration::from_secs(5)));
    pair.client.on_timeout(pair.now + Duration::from_millis(4_900));
    assert_eq!(pair.client.error, None);
    pair.server.connection.accept_move(b"server's");
    pair.run();
    assert!(pair.server.connection.is_held());
    pair.client.connection.moved();
    // A PING with the first number.
    assert!(pair.client.send(pair.now, &mut pair.to_server));
    assert_eq!((pair.to_server[32], pair.to_server[40]), (wire::PING, 1));
    pair.server.connection.resume();
    pair.run();
    assert!(!pair.server.connection.is_held() && !pair.client.connection.is_held());
}
