//! Promises about the handshake.

use std::time::Duration;

use starwire_protocol::limits::FIRST_READ;
use starwire_protocol::{ConnectionError, Failure, Limits, ProtocolError, Secret, Settings, Sniff};

use crate::owner::Ended;
use crate::pair::{End, Pair, settings};
use crate::promises::KEY;
use crate::wire::{self, RawFrame, RawPeer};

fn pair(change: impl FnOnce(&mut Settings, &mut Settings)) -> Pair {
    let (mut client, mut server) = (settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
    change(&mut client, &mut server);
    let mut pair = Pair::new(client, server);
    pair.run();
    pair
}

/// Both sides end with the same code and text.
fn refused(pair: &Pair) -> (i32, String) {
    assert!(!pair.client.connection.is_ready() && !pair.server.connection.is_ready());
    let text = |error: &Option<ConnectionError>| match error {
        Some(ConnectionError::Refused { code, message } | ConnectionError::RefusedByPeer { code, message }) => {
            (*code, message.clone())
        }
        other => panic!("not refused: {other:?}"),
    };
    let (client, server) = (text(&pair.client.error), text(&pair.server.error));
    assert_eq!(client, server);
    client
}

#[test]
fn p20_the_handshake_tells_who_the_peer_is() {
    let pair = pair(|client, server| {
        client.features = 0b0111;
        server.features = 0b1110;
        server.limits.max_recvs = 17;
        server.moved_to = "ps-0b:2222".to_owned();
        client.expected_task = Some("/job:ps/task:0".to_owned());
        client.cluster_id = "c".to_owned();
    });
    let seen = pair.client.owner.ready.as_ref().expect("ready");
    assert_eq!((seen.task.as_str(), seen.incarnation), ("/job:ps/task:0", 1002));
    assert_eq!((seen.features, seen.limits.max_recvs), (0b0110, 17));
    assert_eq!((seen.moved_to.as_str(), seen.authenticated), ("ps-0b:2222", false));
    let seen = pair.server.owner.ready.as_ref().expect("ready");
    assert_eq!((seen.task.as_str(), seen.incarnation, seen.features), ("/job:worker/task:0", 1001, 0b0110));
}

#[test]
fn p20_a_server_decides_on_what_a_client_claims() {
    for allows in [true, false] {
        let (mut client, server) = (settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
        client.address = "worker-0:2222".to_owned();
        let mut pair = Pair::new(client, server);
        pair.server.connection.check_client(Box::new(move |claim| {
            let claimed = (claim.task, claim.incarnation, claim.address);
            assert_eq!(claimed, ("/job:worker/task:0", 1001, "worker-0:2222"));
            let message = "not today".to_owned();
            if allows { Ok(()) } else { Err(Failure { code: 9, message }) }
        }));
        pair.run();
        assert_eq!(pair.server.connection.is_ready(), allows);
        if !allows {
            assert_eq!(refused(&pair), (9, "not today".to_owned()));
        }
    }
}

#[test]
fn p21_a_mismatch_is_refused_with_both_values_in_the_text() {
    let (code, text) = refused(&pair(|client, _| client.expected_task = Some("/job:ps/task:1".to_owned())));
    assert_eq!(code, 9);
    assert_eq!(
        text,
        "expected /job:ps/task:1 at this address but found /job:ps/task:0: with a secret or TLS, a task must have the name that the ClusterSpec gives it"
    );

    let (code, text) = refused(&pair(|_, server| server.protocol = "star_server".to_owned()));
    assert_eq!(code, 9);
    assert_eq!(
        text,
        "/job:ps/task:0 runs protocol \"star_server\", /job:worker/task:0 runs \"grpc++\": all tasks of a cluster must use the same protocol"
    );

    let (code, text) = refused(&pair(|client, server| {
        client.cluster_id = "red".to_owned();
        server.cluster_id = "blue".to_owned();
    }));
    assert_eq!(code, 9);
    assert_eq!(
        text,
        "/job:ps/task:0 belongs to cluster \"blue\", /job:worker/task:0 to cluster \"red\": check STARWIRE_CLUSTER_ID"
    );

    for (features, sides) in
        [((0, 0x40), ["/job:ps/task:0", "/job:worker/task:0"]), ((0x40, 0), ["/job:worker/task:0", "/job:ps/task:0"])]
    {
        let pair = pair(|client, server| {
            (client.required_features, server.required_features) = features;
            (client.features, server.features) = features;
        });
        let [needs, lacks] = sides;
        assert_eq!(refused(&pair), (9, format!("{needs} needs features 0x40, which {lacks} does not have")));
        assert!(pair.server.owner.ready.is_none(), "the server has seen both sides' features");
    }
    let too_low: [fn(&mut Limits); 5] = [
        |limits| limits.max_calls = 0,
        |limits| limits.max_recvs = 0,
        |limits| limits.max_keys = 0,
        |limits| limits.max_key_bytes = 4095,
        |limits| limits.max_payload = 0,
    ];
    for lower in too_low {
        for is_server in [false, true] {
            let (code, text) =
                refused(&pair(|client, server| lower(&mut if is_server { server } else { client }.limits)));
            let side = if is_server { "/job:ps/task:0" } else { "/job:worker/task:0" };
            assert_eq!(code, 9);
            assert!(text.starts_with(&format!("the limits of {side} are too low: ")), "{text}");
        }
    }
    // One key of any length has to fit.
    assert_eq!(pair(|client, _| client.limits.max_key_bytes = 4096).client.error, None);
}

#[test]
fn p21_another_wire_version_is_refused() {
    for version in [2, 4] {
        for (mut peer, mut block) in [
            (peer_of_server(None), wire::block(0, wire::section(&[wire::hello(&[])]), &[])),
            (peer_of_client(None), wire::block(0, wire::section(&[wire::welcome(&[])]), &[])),
        ] {
            peer.listen();
            block[4] = version;
            peer.send(&block);
            let error = peer.end.error.clone().expect("refused");
            assert_eq!(error.code(), 9);
            let words = format!("version {version} of the starwire protocol, this side speaks version 3: use the same");
            assert!(error.to_string().contains(&words), "{error}");
            assert_eq!(peer.listen_frames(), [(wire::REFUSE, 0)]);
        }
    }
}

#[test]
fn p21_a_required_feature_is_named() {
    let names = [(1, "RDMA (STARWIRE_TRANSPORT=verbs)"), (4, "digests of requests"), (0x40, "features 0x40")];
    for (bits, name) in names {
        let pair = pair(|client, _| (client.features, client.required_features) = (bits, bits));
        let (code, text) = refused(&pair);
        assert!(code == 9 && text.contains(name), "{text}");
        assert!(pair.server.owner.ready.is_none(), "the client has said what it needs");
    }
}

#[test]
fn p21_a_feature_that_both_have_may_be_required() {
    let pair = pair(|client, server| {
        for settings in [client, server] {
            (settings.features, settings.required_features) = (0x40, 0x40);
        }
    });
    assert_eq!((&pair.client.error, &pair.server.error), (&None, &None));
    assert!(pair.client.connection.is_ready() && pair.server.connection.is_ready());
}

fn peer_of_server(secret: Option<&[u8]>) -> RawPeer {
    let mut settings = settings("/job:ps/task:0", 2);
    settings.secret = secret.map(Secret::new);
    RawPeer::new(End::server(settings, std::time::Instant::now()))
}

fn peer_of_client(secret: Option<&[u8]>) -> RawPeer {
    let mut settings = settings("/job:worker/task:0", 1);
    settings.secret = secret.map(Secret::new);
    RawPeer::new(End::client(settings, std::time::Instant::now()))
}

#[test]
fn p22_equal_secrets_are_proved_both_ways() {
    let mut pair = pair(|client, server| {
        client.secret = Some(Secret::new(b"correct horse"));
        server.secret = Some(Secret::new(b"correct horse"));
    });
    assert!(pair.client.owner.ready.as_ref().expect("ready").authenticated);
    assert!(pair.server.owner.ready.as_ref().expect("ready").authenticated);
    let id = pair.recv(KEY);
    pair.run();
    pair.reply(id, 0, b"", None);
    pair.run();
    assert!(matches!(pair.client.owner.ended[&id], Ended::Ok { .. }));
    assert_eq!(format!("{:?}", Secret::new(b"correct horse")), "Secret(…)");
}

#[test]
fn p22_different_or_missing_secrets_are_refused() {
    for (left, right) in [(Some("a"), None), (None, Some("b")), (Some("a"), Some("b"))] {
        let pair = pair(|client, server| {
            client.secret = left.map(|secret| Secret::new(secret.as_bytes()));
            server.secret = right.map(|secret| Secret::new(secret.as_bytes()));
        });
        let (code, text) = refused(&pair);
        assert_eq!(code, 16);
        assert!(text.contains("secret") && text.contains("STARWIRE_SECRET_FILE"), "{text}");
    }
}

#[test]
fn p22_a_side_without_proof_is_not_listened_to() {
    let frames: [RawFrame; 6] = [
        wire::hello(&[]),
        RawFrame::new(wire::MOVE, 0),
        wire::key(0, KEY),
        wire::call(1, &[]),
        RawFrame::new(wire::PING, 1),
        RawFrame::new(wire::GOODBYE, 0),
    ];
    for frame in frames {
        // Before the challenge, in the same block as the challenge, and after it.
        let challenge = RawFrame::new(wire::CHALLENGE, 0).meta(&[1; 32]);
        for blocks in [
            vec![vec![frame.clone()]],
            vec![vec![challenge.clone(), frame.clone()]],
            vec![vec![challenge], vec![frame]],
        ] {
            let mut peer = peer_of_server(Some(b"s"));
            for frames in &blocks {
                peer.say(frames);
            }
            assert!(peer.end.error.is_some());
            assert!(peer.end.owner.ready.is_none() && peer.end.owner.requests.is_empty());
        }
    }
}

#[test]
fn p22_a_server_that_does_not_prove_itself_gets_nothing_but_the_clients_proof() {
    let answers: [Vec<RawFrame>; 4] = [
        vec![wire::welcome(&[])],
        vec![RawFrame::new(wire::CHALLENGE, 0).meta(&[2; 32]), wire::welcome(&[])],
        vec![RawFrame::new(wire::CHALLENGE, 0).meta(&[2; 32]), wire::reply(1, &[])],
        // The client's own challenge and, below, its own blocks.
        vec![RawFrame::new(wire::CHALLENGE, 0).meta(&[1; 32])],
    ];
    for answer in answers {
        let mut peer = peer_of_client(Some(b"s"));
        assert_eq!(peer.listen_frames(), [(wire::CHALLENGE, 0)]);
        peer.say(&answer);
        let reflected = peer.listen();
        peer.send(&reflected);
        assert!(peer.end.error.is_some() && peer.end.owner.ready.is_none(), "{:?}", peer.end.error);
        peer.end.recv_key(peer.now, 1, KEY);
        let said = peer.listen();
        assert!(said.is_empty() || said[32] == wire::REFUSE);
    }
}

#[test]
fn p22_a_client_without_the_secret_gets_nothing_to_test_guesses_with() {
    let mut peer = peer_of_server(Some(b"s"));
    peer.say(&[RawFrame::new(wire::CHALLENGE, 0).meta(&[1; 32])]);
    assert_eq!(peer.listen(), wire::block(0, wire::section(&[RawFrame::new(wire::CHALLENGE, 0).meta(&[2; 32])]), &[]));
    peer.say(&[wire::hello(&[])]);
    let Some(ConnectionError::Refused { code: 16, message }) = peer.end.error.clone() else { panic!("let in") };
    // Exactly the reason, without a code made from the secret.
    let refusal = RawFrame::new(wire::REFUSE, 0).code(16).meta(message.as_bytes());
    assert_eq!(peer.listen(), wire::block(1, wire::section(&[refusal]), &[]));
    assert!(!message.contains("/job:"), "{message}");
}

#[test]
fn p22_a_peer_without_the_secret_chooses_no_code() {
    for code in [0, 1, 10, 11, 255, 14, 9, 16] {
        for challenged in [false, true] {
            let mut peer = peer_of_client(Some(b"s"));
            if challenged {
                peer.say(&[RawFrame::new(wire::CHALLENGE, 0).meta(&[2; 32])]);
            }
            peer.say(&[RawFrame::new(wire::REFUSE, 0).code(code).meta(b"go away")]);
            let Some(ConnectionError::RefusedByPeer { code: seen, message }) = &peer.end.error else {
                panic!("{:?}", peer.end.error)
            };
            assert_eq!((*seen, message.as_str()), (if matches!(code, 9 | 16) { code.into() } else { 14 }, "go away"));
        }
    }
}

#[test]
fn p22_a_second_challenge_is_out_of_turn() {
    let challenge = RawFrame::new(wire::CHALLENGE, 0).meta(&[1; 32]);
    let mut peer = peer_of_server(Some(b"s"));
    peer.say(&[challenge.clone(), challenge]);
    let unexpected = ProtocolError::Unexpected { frame: "CHALLENGE", when: "at this point in the handshake" };
    assert_eq!(peer.end.error, Some(ConnectionError::Protocol(unexpected)));
}

/// The code of a block is within what is read first.
#[test]
fn p22_with_a_secret_blocks_are_not_longer_than_they_must_be() {
    let mut pair = pair(|client, server| {
        client.secret = Some(Secret::new(b"correct horse"));
        server.secret = client.secret.clone();
    });
    pair.client.blocks.clear();
    pair.call(1, b"", Some(vec![vec![1; 10_000]]), None);
    pair.run();
    assert_eq!(pair.client.blocks, [(FIRST_READ, 10_000)]);
    assert_eq!(pair.server.owner.requests.len(), 1);
}

#[test]
fn p23_requests_made_early_wait_for_the_handshake() {
    let mut pair = Pair::new(settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
    let (recv, call) = (pair.recv(KEY), pair.call(1, b"early", Some(vec![vec![1; 10_000]]), None));
    pair.run();
    assert_eq!(pair.server.owner.requests.len(), 2);
    pair.reply(recv, 0, b"", None);
    pair.reply(call, 0, b"", None);
    pair.run();
    assert_eq!(pair.client.owner.ended.len(), 2);
}

#[test]
fn p24_a_peer_costs_next_to_nothing_before_the_handshake() {
    let server = || RawPeer::new(End::server(settings("/job:ps/task:0", 2), std::time::Instant::now()));
    // Not a byte beyond 4 KiB of control section is taken.
    let mut peer = server();
    peer.send(&wire::block(0, vec![0; 4104], &[])[..32]);
    assert!(matches!(peer.end.error, Some(ConnectionError::Protocol(_))));
    // No request, no bulk bytes, no second HELLO.
    let cases: [&[RawFrame]; 4] = [
        &[wire::key(0, b"k")],
        &[wire::call(1, &[])],
        &[RawFrame::new(wire::PING, 1)],
        &[wire::hello(&[]), wire::hello(&[])],
    ];
    for frames in cases {
        let mut peer = server();
        peer.say(frames);
        assert!(matches!(peer.end.error, Some(ConnectionError::Protocol(_))));
        assert!(peer.end.owner.requests.is_empty());
    }
    let mut peer = server();
    peer.say_bulk(&[wire::hello(&[])], &[1; 100]);
    assert!(matches!(peer.end.error, Some(ConnectionError::Protocol(_))));
    // Nor endless patience.
    let mut pair = Pair::new(settings("/job:worker/task:0", 1), settings("/job:ps/task:0", 2));
    pair.advance(Duration::from_secs(10));
    assert!(matches!(pair.server.error, Some(ConnectionError::HandshakeTimeout { waited }) if waited.as_secs() == 10));
    assert!(matches!(pair.client.error, Some(ConnectionError::HandshakeTimeout { .. })));
}

#[test]
fn p24_broken_hellos_are_protocol_errors() {
    let long = vec![b'x'; 513];
    let cases: Vec<(&str, RawFrame)> = vec![
        ("empty", RawFrame::new(wire::HELLO, 0)),
        ("code", wire::hello(&[]).code(1)),
        ("twice", wire::hello(&[(2, b"/job:x")])),
        ("too long", wire::hello(&[(5, &long)])),
        ("not text", wire::hello(&[(5, b"\xff\xfe")])),
        ("control characters", wire::hello(&[(5, b"a\nb")])),
        ("wrong width", wire::hello(&[(10, b"1234567")])),
        ("cut off", RawFrame::new(wire::HELLO, 0).meta(&[1, 0, 9, 0, b'g'])),
    ];
    for (what, frame) in cases {
        let mut peer = RawPeer::new(End::server(settings("/job:ps/task:0", 2), std::time::Instant::now()));
        peer.say(&[frame]);
        assert!(matches!(peer.end.error, Some(ConnectionError::Protocol(_))), "{what}: {:?}", peer.end.error);
    }
    // Fields of a later version are skipped.
    let mut peer = RawPeer::new(End::server(settings("/job:ps/task:0", 2), std::time::Instant::now()));
    peer.say(&[wire::hello(&[(63, b"news"), (1000, b"more news")])]);
    assert!(peer.end.connection.is_ready());
}

#[test]
fn p24_the_longest_hello_is_not_too_long() {
    let server = || RawPeer::new(End::server(settings("/job:ps/task:0", 2), std::time::Instant::now()));
    // A section of 4 KiB.
    let mut control = wire::section(&[wire::hello(&[])]);
    control.resize(4096, 0);
    let mut peer = server();
    peer.send(&wire::block(0, control, &[]));
    assert!(peer.end.connection.is_ready(), "{:?}", peer.end.error);
    // An address of 512 bytes, and a field whose tag is the first one that is not looked at.
    let mut peer = server();
    let address = vec![b'a'; 512];
    peer.say(&[wire::hello(&[(12, &address), (64, b"news")])]);
    assert!(peer.end.connection.is_ready(), "{:?}", peer.end.error);
}

#[test]
fn p25_http_is_told_apart_and_its_bytes_are_kept() {
    for (bytes, kind) in [
        (&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0"[..], Sniff::Http2),
        (b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", Sniff::Http1),
        (b"\x16\x03\x01\x02\x00\x01", Sniff::Tls),
    ] {
        for max in [1, 3, usize::MAX] {
            let mut end = End::server(settings("/job:ps/task:0", 2), std::time::Instant::now());
            let mut wire = bytes.iter().copied().collect();
            while end.error.is_none() {
                assert!(end.begin_receive());
                assert_ne!(end.finish_receive(std::time::Instant::now(), &mut wire, max), 0);
            }
            assert_eq!(end.error, Some(ConnectionError::NotStarwire(kind)));
            let seen = bytes.len() - wire.len();
            assert_eq!(end.connection.unread(), &bytes[..seen]);
            assert!(!end.connection.wants_transmit(), "nothing of ours is said to it");
        }
    }
}
