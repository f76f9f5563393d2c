//! Promises about the end of a connection, and about what a client may wait for.

use starwire_protocol::Recv;

use crate::owner::Ended;
use crate::pair::Pair;
use crate::promises::KEY;
use crate::wire;

#[test]
fn p34_an_orderly_end_says_goodbye_and_waits_for_nobody() {
    let mut pair = Pair::ready();
    let (asked, called) = (pair.recv(KEY), pair.call(5, b"", None, None));
    pair.run();
    // A large answer waits to be sent.
    pair.reply(called, 0, b"", Some(vec![vec![7; 9 << 20]]));
    pair.server.connection.leave("the server was stopped");
    assert_eq!(pair.server.payloads.get(), 0, "what is not on its way is dropped");
    pair.run();
    assert_eq!(pair.client.owner.goodbyes, ["the server was stopped"]);
    assert_eq!((&pair.client.error, &pair.server.error), (&None, &None));
    assert!(pair.client.owner.ended.is_empty(), "how requests end is told by the end of the connection");
    assert!(!pair.server.connection.wants_transmit() && !pair.server.begin_receive());
    // Whatever is asked for now is refused at once, on both sides.
    let late = pair.recv(KEY);
    assert!(
        matches!(&pair.client.owner.ended[&late], Ended::Local { code: 14, message } if message.contains("stopped"))
    );
    pair.server.connection.leave("again");
    assert!(!pair.server.connection.wants_transmit());
    pair.client.fail(14, "the peer is gone");
    pair.server.fail(14, "gone");
    for id in [asked, called] {
        assert!(matches!(pair.client.owner.ended[&id], Ended::Local { code: 14, .. }));
    }
}

#[test]
fn p34_a_client_leaves_in_order_too() {
    let mut pair = Pair::ready();
    let asked = pair.recv(KEY);
    pair.run();
    pair.client.connection.leave("the process is exiting");
    pair.run();
    assert_eq!(pair.server.owner.goodbyes, ["the process is exiting"]);
    let late = pair.recv(KEY);
    assert!(
        matches!(&pair.client.owner.ended[&late], Ended::Local { code: 14, message } if message.contains("the process is exiting"))
    );
    pair.client.fail(14, "gone");
    assert!(matches!(pair.client.owner.ended[&asked], Ended::Local { .. }));
}

#[test]
fn p34_unauthenticated_peers_are_refused_with_a_reason_at_any_time() {
    use crate::pair::{End, settings};
    for hello in [false, true] {
        let mut peer = wire::RawPeer::new(End::server(settings("/job:ps/task:0", 2), std::time::Instant::now()));
        if hello {
            peer.say(&[wire::hello(&[])]);
            peer.listen();
        }
        peer.end.connection.refuse(14, "too many");
        assert_eq!(peer.listen_frames(), [(wire::REFUSE, 0)]);
        assert!(!peer.end.begin_receive());
    }
    // Without a handshake there is nobody to say goodbye to.
    let mut peer = wire::RawPeer::new(End::server(settings("/job:ps/task:0", 2), std::time::Instant::now()));
    peer.end.connection.leave("stopped");
    assert!(peer.listen_frames().is_empty());
}

#[test]
fn p35_tensors_of_too_many_steps_are_refused_and_nothing_else() {
    let _reached = starwire_marks::expect("tensor requests of too many steps");
    const MOST: u64 = 4096;
    let mut pair = Pair::ready();
    let ask = |pair: &mut Pair, step: u64| {
        let id = pair.id();
        let recv = Recv { id, step: step as i64, prefix: KEY, frame: 0, iter: 0, deadline: None, op: () };
        pair.client.recv(pair.now, recv);
        id
    };
    let ids: Vec<u64> = (0..MOST + 100).map(|step| ask(&mut pair, step)).collect();
    let again = ask(&mut pair, 5);
    pair.run();
    assert_eq!(pair.server.owner.requests.len() as u64, MOST + 1);
    assert_eq!(pair.client.owner.ended.len(), 100);
    for id in &ids[MOST as usize..] {
        assert!(matches!(&pair.client.owner.ended[id], Ended::Peer { code: 8, .. }), "{id}");
    }
    // Room is made by the last answer for a step, or by its cancellation.
    pair.reply(again, 0, b"", None);
    pair.run();
    let refused = ask(&mut pair, MOST);
    pair.run();
    assert!(matches!(pair.client.owner.ended[&refused], Ended::Peer { code: 8, .. }));
    pair.reply(ids[5], 0, b"", None);
    pair.cancel(ids[6]);
    pair.run();
    let (first, second) = (ask(&mut pair, MOST), ask(&mut pair, MOST + 1));
    pair.run();
    assert!(!pair.client.owner.ended.contains_key(&first) && !pair.client.owner.ended.contains_key(&second));
    assert_eq!((&pair.client.error, &pair.server.error), (&None, &None));
}
