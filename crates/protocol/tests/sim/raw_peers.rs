//! Promises about peers that break the protocol: always a clear error, never a panic, never unbounded memory.

use starwire_protocol::{Call, ConnectionError, ProtocolError, Settings};

use crate::owner::{Ended, REFUSED_METHOD};
use crate::pair::settings;
use crate::promises::KEY;
use crate::wire::{self, BULK, RawFrame, RawPeer};

fn server_settings() -> Settings {
    let mut settings = settings("/job:ps/task:0", 2);
    settings.limits.max_recvs = 10;
    settings.limits.max_calls = 4;
    settings.limits.max_call_bytes = 100_000;
    settings.limits.max_keys = 5;
    settings.limits.max_payload = 1_000_000;
    settings
}

fn protocol_error(peer: &RawPeer) -> &ProtocolError {
    match &peer.end.error {
        Some(ConnectionError::Protocol(error)) => error,
        other => panic!("no protocol error: {other:?}"),
    }
}

/// What a server says to frames of a client that was welcomed.
fn server_says(frames: &[RawFrame], bulk: &[u8]) -> RawPeer {
    let mut peer = RawPeer::welcomed(server_settings());
    peer.listen();
    peer.say_bulk(frames, bulk);
    peer
}

#[test]
fn p26_damaged_blocks_are_noticed() {
    let good = wire::block(1, wire::section(&[wire::key(0, KEY), wire::recv(1, 0)]), &[]);
    for at in 0..good.len() {
        let mut peer = RawPeer::welcomed(server_settings());
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        peer.send(&bad);
        assert!(peer.end.owner.requests.is_empty());
        if !(8..12).contains(&at) {
            protocol_error(&peer);
        }
    }
}

/// Their checksum is right: whoever wrote them speaks another protocol.
#[test]
fn p26_bits_of_the_header_that_mean_nothing_are_refused() {
    let good = wire::block(1, wire::section(&[wire::key(0, KEY), wire::recv(1, 0)]), &[]);
    for at in 5..8 {
        let mut peer = RawPeer::welcomed(server_settings());
        let mut bad = good.clone();
        bad[at] = 1;
        wire::seal(&mut bad);
        peer.send(&bad);
        assert!(matches!(protocol_error(&peer), ProtocolError::Reserved { block: 1 }), "byte {at}");
        assert!(peer.end.owner.requests.is_empty());
    }
}

#[test]
fn p26_replayed_lost_and_reordered_blocks_are_noticed() {
    for sequence in [0, 2, u64::MAX] {
        let mut peer = RawPeer::welcomed(server_settings());
        peer.send(&wire::block(sequence, wire::section(&[wire::key(0, KEY)]), &[]));
        assert!(matches!(protocol_error(&peer), ProtocolError::Sequence { block: 1, .. }));
    }
}

#[test]
fn p26_a_broken_connection_says_why_and_then_nothing() {
    let mut peer = server_says(&[RawFrame::new(99, 0)], &[]);
    assert!(matches!(protocol_error(&peer), ProtocolError::UnknownFrame { kind: 99 }));
    assert_eq!(peer.listen_frames(), [(wire::REFUSE, 0)]);
    assert_eq!(peer.listen_frames(), []);
    assert!(!peer.end.begin_receive());

    let mut peer = RawPeer::serving(settings("/job:worker/task:0", 1));
    peer.say(&[RawFrame::new(99, 0)]);
    protocol_error(&peer);
    let end = &mut peer.end;
    end.recv_key(peer.now, 1, KEY);
    let Ended::Local { code: 14, message } = &end.owner.ended[&1] else { panic!("not refused") };
    assert!(message.contains("unknown frame kind 99"), "{message}");
    assert_eq!(peer.listen_frames(), [(wire::REFUSE, 0)]);
}

#[test]
fn p27_lengths_are_checked_before_memory_is_taken() {
    let header = |control: u32, bulk: u64| {
        let mut block = wire::block(1, Vec::new(), &[]);
        block[8..12].copy_from_slice(&control.to_le_bytes());
        block[16..24].copy_from_slice(&bulk.to_le_bytes());
        block
    };
    for block in
        [header((4 << 20) + 8, 0), header(u32::MAX - 7, 0), header(1024, (16 << 20) + 1), header(1024, u64::MAX)]
    {
        let mut peer = RawPeer::welcomed(server_settings());
        peer.send(&block);
        assert!(matches!(protocol_error(&peer), ProtocolError::TooLarge { .. }));
    }
    for block in [header(12, 0), header(984, 1)] {
        let mut peer = RawPeer::welcomed(server_settings());
        peer.send(&block);
        assert!(matches!(protocol_error(&peer), ProtocolError::Frame { .. }));
    }
    let mut long_meta = wire::call(1, &[]).bytes();
    long_meta[4..8].copy_from_slice(&u32::MAX.to_le_bytes());
    let mut many_parts = wire::call(1, &[]).bytes();
    many_parts[20..24].copy_from_slice(&65_537u32.to_le_bytes());
    for section in [long_meta, many_parts] {
        let mut peer = RawPeer::welcomed(server_settings());
        peer.send(&wire::block(1, section, &[]));
        assert!(matches!(protocol_error(&peer), ProtocolError::TooLarge { .. }));
    }
    let huge: [&[u64]; 3] = [&[BULK | 1_000_001], &[BULK | 500_001, BULK | 500_000], &[u64::MAX, u64::MAX, u64::MAX]];
    for lens in huge {
        let peer = server_says(&[wire::call(1, lens)], &[]);
        protocol_error(&peer);
        assert_eq!(peer.end.owner.bodies.get(), 0);
    }
}

#[test]
fn p27_the_largest_block_is_not_too_large() {
    let mut peer = RawPeer::welcomed(settings("/job:ps/task:0", 2));
    peer.say_bulk(&[wire::call(1, &[BULK | (16 << 20)]), wire::data(1, 16 << 20)], &vec![7; 16 << 20]);
    assert_eq!(peer.end.error, None);
    assert!(peer.end.owner.take_request(1).is_some());
    // Nor is the largest payload.
    let peer = server_says(&[wire::call(1, &[BULK | 1_000_000])], &[]);
    assert_eq!(peer.end.error, None);
}

/// `begin_receive` counts them.
#[test]
fn p27_the_targets_of_a_receive_are_bounded() {
    let mut peer = RawPeer::welcomed(settings("/job:ps/task:0", 2));
    peer.say_bulk(&[wire::call(1, &[BULK | 1; 600]), wire::data(1, 600)], &[7; 600]);
    assert_eq!(peer.end.error, None);
    assert!(peer.end.owner.take_request(1).is_some());
    // Many payloads that nobody wants.
    let unwanted = |id| [wire::call(id, &[BULK | 1]).code(REFUSED_METHOD), wire::data(id, 1)];
    let frames: Vec<RawFrame> = (2..602).flat_map(unwanted).collect();
    peer.say_bulk(&frames, &[7; 600]);
    assert_eq!(peer.end.error, None);
    assert_eq!(peer.end.owner.bodies.get(), 0);
}

#[test]
fn p28_malformed_frames_are_protocol_errors() {
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("cut off", wire::recv(1, 0).bytes()[..24].to_vec()),
        ("unknown flags", RawFrame::new(wire::CANCEL, 1).flags(1).bytes()),
        ("code where none belongs", RawFrame::new(wire::PING, 1).code(5).bytes()),
        ("id where none belongs", RawFrame::new(22, 1).bytes()),
        ("metadata where none belongs", RawFrame::new(wire::CANCEL, 1).meta(b"x").bytes()),
        ("method 0", wire::call(1, &[]).code(0).bytes()),
        ("inline part missing", wire::call(1, &[100]).bytes()),
        ("inline part too long", wire::call(1, &[(1 << 20) + 1]).bytes()),
        ("empty bulk part", wire::call(1, &[BULK]).bytes()),
        ("padding", [vec![0; 8], vec![1; 8]].concat()),
        ("padding of metadata", {
            let mut bytes = wire::key(0, b"abc").bytes();
            bytes[20] = 1;
            bytes
        }),
        ("DATA of length 0", wire::data(1, 0).bytes()),
        ("ABORT with length", wire::data(1, 5).flags(1).bytes()),
    ];
    for (what, section) in cases {
        let mut peer = RawPeer::welcomed(server_settings());
        peer.send(&wire::block(1, section, &[]));
        assert!(peer.end.owner.requests.is_empty(), "{what}");
        protocol_error(&peer);
    }
}

#[test]
fn p28_frames_of_the_other_side_are_protocol_errors() {
    const LATE: &str = "after the handshake";
    let unexpected = |frame, when| ProtocolError::Unexpected { frame, when };
    let challenge = RawFrame::new(wire::CHALLENGE, 0).meta(&[0; 32]);
    let to_servers: [(RawFrame, ProtocolError); 5] = [
        (wire::hello(&[]), unexpected("HELLO", LATE)),
        (wire::welcome(&[]), unexpected("WELCOME", "from the client side")),
        (wire::reply(1, &[]), unexpected("REPLY", "from the client side")),
        (challenge.clone(), unexpected("CHALLENGE", LATE)),
        (RawFrame::new(77, 0), ProtocolError::UnknownFrame { kind: 77 }),
    ];
    for (frame, error) in to_servers {
        assert_eq!(protocol_error(&server_says(&[frame], &[])), &error);
    }
    let to_clients: [(RawFrame, ProtocolError); 7] = [
        (wire::hello(&[]), unexpected("HELLO", "from the server side")),
        (wire::key(0, KEY), unexpected("KEY", "from the server side")),
        (wire::recv(1, 0), unexpected("RECV", "from the server side")),
        (wire::call(1, &[]), unexpected("CALL", "from the server side")),
        (RawFrame::new(wire::CANCEL, 1).code(1), unexpected("CANCEL", "from the server side")),
        (wire::welcome(&[]), unexpected("WELCOME", LATE)),
        (challenge, unexpected("CHALLENGE", LATE)),
    ];
    for (frame, error) in to_clients {
        let mut peer = RawPeer::serving(settings("/job:worker/task:0", 1));
        peer.say(&[frame]);
        assert_eq!(protocol_error(&peer), &error);
    }
}

#[test]
fn p29_exceeding_the_announced_limits_is_a_protocol_error() {
    let window = |frames: &[RawFrame]| {
        let peer = server_says(frames, &[]);
        assert!(matches!(protocol_error(&peer), ProtocolError::Window { .. }), "{:?}", peer.end.error);
    };
    let mut frames = vec![wire::key(0, KEY)];
    frames.extend((0..11).map(|id| wire::recv(id, 0)));
    window(&frames);
    let calls: Vec<_> = (0..5).map(|id| wire::call(id, &[])).collect();
    window(&calls);
    window(&[wire::call(1, &[BULK | 60_000]), wire::call(2, &[BULK | 60_000])]);
    let keys: Vec<_> = (0..6).map(|key| wire::key(key, KEY)).collect();
    window(&keys);
    // Refused requests count until their answers leave: a peer that does not read cannot make them pile up.
    let mut peer = RawPeer::welcomed(server_settings());
    peer.listen();
    let mut frames = vec![wire::key(0, crate::owner::BAD_PREFIX)];
    frames.extend((0..10).map(|id| wire::recv(id, 0)));
    peer.say(&frames);
    assert_eq!(peer.end.error, None);
    peer.say(&[wire::recv(11, 0)]);
    assert!(matches!(protocol_error(&peer), ProtocolError::Window { .. }));
}

#[test]
fn p29_a_client_limits_the_payload_of_a_reply() {
    for (frame, fits) in [
        (wire::reply(1, &[1000]).inline(&[7; 1000]), true),
        (wire::reply(1, &[1001]).inline(&[7; 1001]), false),
        (wire::reply(1, &[BULK | 9000]), false),
    ] {
        let mut settings = settings("/job:worker/task:0", 1);
        settings.limits.max_payload = 1000;
        let mut peer = RawPeer::serving(settings);
        peer.end.recv_key(peer.now, 1, KEY);
        peer.listen();
        peer.say(&[frame]);
        if fits {
            assert_eq!(peer.end.owner.ended[&1], Ended::Ok { meta: Vec::new(), parts: vec![vec![7; 1000]] });
        } else {
            assert!(matches!(protocol_error(&peer), ProtocolError::TooLarge { what: "length of a payload", .. }));
        }
    }
}

#[test]
fn p30_ids_and_lengths_must_match_what_is_in_flight() {
    let bad: Vec<(&str, Vec<RawFrame>, usize)> = vec![
        ("same id twice", vec![wire::key(0, KEY), wire::recv(1, 0), wire::recv(1, 0)], 0),
        ("same id for recv and call", vec![wire::key(0, KEY), wire::recv(1, 0), wire::call(1, &[])], 0),
        ("unknown key", vec![wire::recv(1, 0)], 0),
        ("keys out of order", vec![wire::key(1, KEY)], 0),
        ("data for nobody", vec![wire::data(1, 5)], 5),
        ("more data than announced", vec![wire::call(1, &[BULK | 4]), wire::data(1, 5)], 5),
        ("two DATA in a block", vec![wire::call(1, &[BULK | 9]), wire::data(1, 5), wire::data(1, 4)], 9),
        ("bulk without DATA", vec![wire::call(1, &[BULK | 9])], 9),
        ("DATA without bulk", vec![wire::call(1, &[BULK | 9]), wire::data(1, 9)], 0),
        ("abort of a wanted payload", vec![wire::call(1, &[BULK | 9]), wire::data(1, 0).flags(1)], 0),
        ("abort of nothing", vec![wire::data(1, 0).flags(1)], 0),
    ];
    for (what, frames, bulk) in bad {
        let peer = server_says(&frames, &vec![7; bulk]);
        assert!(matches!(peer.end.error, Some(ConnectionError::Protocol(_))), "{what}");
    }
    // A client holds its server to the same.
    let bad: Vec<(&str, Vec<RawFrame>, usize)> = vec![
        ("reply to nobody", vec![wire::reply(99, &[])], 0),
        ("reply twice", vec![wire::reply(1, &[BULK | 9]), wire::reply(1, &[])], 0),
        ("bulk error details", vec![wire::reply(1, &[BULK | 9]).code(3)], 0),
        ("abort of a wanted reply", vec![wire::reply(1, &[BULK | 9]), wire::data(1, 0).flags(1)], 0),
        ("data before reply", vec![wire::data(1, 9)], 9),
    ];
    for (what, frames, bulk) in bad {
        let mut peer = RawPeer::serving(settings("/job:worker/task:0", 1));
        let end = &mut peer.end;
        end.recv_key(peer.now, 1, KEY);
        peer.listen();
        peer.say_bulk(&frames, &vec![7; bulk]);
        assert!(matches!(peer.end.error, Some(ConnectionError::Protocol(_))), "{what}");
        peer.end.fail(14, "gone");
        assert_eq!(peer.end.owner.ended.len(), 1, "{what}");
    }
}

#[test]
fn p30_an_id_used_again_within_a_block_cannot_mix_payloads() {
    // DATA of the first call, its CANCEL, and a second call with the same id: the first call's bytes must not land in
    // the second.
    for cut in [1, 3, 12, usize::MAX] {
        let mut peer = RawPeer::welcomed(server_settings());
        peer.listen();
        peer.cut = cut;
        peer.say_bulk(
            &[
                wire::call(1, &[BULK | 20]),
                wire::data(1, 10),
                RawFrame::new(wire::CANCEL, 1).code(1),
                wire::call(1, &[BULK | 5]),
                wire::data(1, 5),
            ],
            &[&[1u8; 10][..], &[2; 5]].concat(),
        );
        assert_eq!(peer.end.error, None);
        let request = peer.end.owner.take_request(1);
        let Some(crate::owner::Request::Call { parts, .. }) = request else { panic!("the second call is complete") };
        assert_eq!(parts, [vec![2; 5]], "cut {cut}");
        assert_eq!(peer.end.owner.bodies.get(), 0);
        peer.end.connection.reply(1, 0, b"", None);
        assert_eq!(peer.listen_frames(), [(wire::REPLY, 1), (wire::REPLY, 1)]);
    }
}

#[test]
fn p30_refused_payloads_do_not_pile_up() {
    let mut peer = RawPeer::welcomed(server_settings());
    let mut id = 0;
    while peer.end.error.is_none() {
        // Refused calls whose bytes never come, while the answers are read.
        peer.say(&[wire::call(id, &[BULK | 10]).code(REFUSED_METHOD)]);
        peer.listen();
        id += 1;
        assert!(id < 20);
    }
    assert_eq!(id, 9, "twice as many as calls");
    assert!(matches!(protocol_error(&peer), ProtocolError::Window { what: "number of calls in flight", limit: 4 }));
}

#[test]
fn p30_more_data_than_announced_in_a_later_block() {
    let mut peer = RawPeer::welcomed(server_settings());
    peer.say_bulk(&[wire::call(1, &[BULK | 9]), wire::data(1, 5)], &[7; 5]);
    assert_eq!(peer.end.error, None);
    peer.say_bulk(&[wire::data(1, 5)], &[7; 5]);
    assert!(matches!(protocol_error(&peer), ProtocolError::BadId { why: "expects fewer bytes", .. }));
}

#[test]
fn p30_an_id_is_in_use_as_long_as_bytes_travel_for_it() {
    for again in [[wire::recv(1, 0)], [wire::call(1, &[])]] {
        let still = |peer: &RawPeer| {
            assert!(matches!(protocol_error(peer), ProtocolError::BadId { id: 1, why: "is still in flight", .. }));
        };
        // Bytes of a refused call are still to come.
        let mut peer = RawPeer::welcomed(server_settings());
        peer.say(&[wire::key(0, KEY), wire::call(1, &[BULK | 10]).code(REFUSED_METHOD)]);
        peer.listen();
        assert_eq!(peer.end.error, None);
        peer.say(&again);
        still(&peer);
        // The bytes of an answer wait to be sent.
        let mut peer = RawPeer::welcomed(server_settings());
        peer.say(&[wire::key(0, KEY), wire::recv(1, 0)]);
        let payload = peer.end.payload(vec![vec![1; 100_000]]);
        peer.end.connection.reply(1, 0, b"", payload);
        peer.say(&again);
        still(&peer);
    }
}

#[test]
fn p30_what_was_not_sent_cannot_be_answered() {
    let mut peer = RawPeer::serving(settings("/job:worker/task:0", 1));
    let payload = peer.end.payload(vec![vec![3; 100_000]]);
    let call = Call { id: 1, method: 5, meta: Vec::new(), payload, deadline: None, op: () };
    peer.end.call(peer.now, call);
    peer.say(&[wire::reply(1, &[])]);
    assert!(matches!(protocol_error(&peer), ProtocolError::BadId { why: "was never sent", .. }));
}

#[test]
fn p31_an_early_answer_is_accepted_and_the_rest_of_the_call_is_not_sent() {
    let _reached = starwire_marks::expect("a call is answered before all of it was sent");
    let mut peer = RawPeer::serving(settings("/job:worker/task:0", 1));
    let payload = peer.end.payload(vec![vec![3; 9 << 20]]);
    let end = &mut peer.end;
    end.call(peer.now, Call { id: 1, method: 5, meta: Vec::new(), payload, deadline: None, op: () });
    let mut wire = std::collections::VecDeque::new();
    assert!(peer.end.send(peer.now, &mut wire));
    peer.say(&[wire::reply(1, &[4]).inline(b"done")]);
    assert_eq!(peer.end.error, None);
    assert_eq!(peer.end.owner.ended[&1], Ended::Ok { meta: Vec::new(), parts: vec![b"done".to_vec()] });
    assert_eq!(peer.end.payloads.get(), 0);
    assert_eq!(peer.listen_frames(), [(wire::DATA, 1)]);
}

#[test]
fn events_come_in_the_order_of_the_frames() {
    let mut peer = RawPeer::welcomed(server_settings());
    let cancel = |id| RawFrame::new(wire::CANCEL, id).code(1);
    peer.say(&[
        wire::key(0, KEY),
        wire::recv(1, 0),
        wire::call(2, &[]),
        wire::recv(3, 0),
        cancel(1),
        wire::key(0, b"other").flags(1),
        wire::recv(4, 0),
        RawFrame::new(wire::GOODBYE, 0).meta(b"bye"),
        cancel(4),
    ]);
    let expected = [
        "ready",
        "key 0",
        "recv 1",
        "call 2",
        "recv 3",
        "cancelled 1",
        "keys forgotten",
        "key 0",
        "recv 4",
        "goodbye",
        "cancelled 4",
    ];
    assert_eq!(peer.end.owner.order, expected);
    peer.end.fail(14, "gone");
    assert_eq!(peer.end.owner.order[expected.len()..], ["cancelled 2", "cancelled 3"]);
}

#[test]
fn an_id_that_is_used_twice_does_not_hide_the_first_request() {
    let mut peer = RawPeer::welcomed(server_settings());
    peer.say(&[wire::key(0, KEY), wire::call(1, &[])]);
    peer.say(&[wire::recv(1, 0)]);
    protocol_error(&peer);
    peer.end.fail(14, "gone");
    assert_eq!(peer.end.owner.cancelled, [(1, 5, 0, true)]);
}

/// The answer to a CANCEL has its code.
#[test]
fn a_cancelled_request_is_answered_with_the_code_of_its_cancellation() {
    for (wanted, said) in [(0, 1), (1, 1), (4, 4)] {
        let mut peer = RawPeer::welcomed(server_settings());
        peer.say(&[wire::call(1, &[])]);
        peer.listen();
        peer.say(&[RawFrame::new(wire::CANCEL, 1).code(wanted)]);
        let bytes = peer.listen();
        assert_eq!((bytes[32], &bytes[34..36]), (wire::REPLY, &[said, 0][..]));
    }
}

#[test]
fn a_server_chooses_the_code_with_which_it_turns_a_client_away() {
    for (said, seen) in [(0, 14), (8, 8), (10, 10)] {
        let mut peer = RawPeer::serving(settings("/job:worker/task:0", 1));
        peer.say(&[RawFrame::new(wire::REFUSE, 0).code(said).meta(b"busy")]);
        let refused = ConnectionError::RefusedByPeer { code: seen, message: "busy".to_owned() };
        assert_eq!(peer.end.error, Some(refused));
    }
}
