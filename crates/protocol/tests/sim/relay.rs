//! Promises about a relay: it sees and changes every byte between two sides that have a secret which it does not know.

use std::collections::VecDeque;

use starwire_protocol::{ConnectionError, Secret, Settings};

use crate::owner::{Ended, Request};
use crate::pair::{Pair, settings};
use crate::random::Random;
use crate::wire;

fn with_secret(task: &str, challenge: u8, secret: &Secret) -> Settings {
    let mut settings = settings(task, challenge);
    settings.secret = Some(secret.clone());
    settings
}

fn pair(secret: &Secret, challenges: (u8, u8)) -> Pair {
    Pair::new(
        with_secret("/job:worker/task:0", challenges.0, secret),
        with_secret("/job:ps/task:0", challenges.1, secret),
    )
}

/// The blocks of a stream without bulk bytes.
fn blocks(stream: &mut VecDeque<u8>) -> Vec<Vec<u8>> {
    let mut rest: &[u8] = stream.make_contiguous();
    let mut blocks = Vec::new();
    while !rest.is_empty() {
        let control = u32::from_le_bytes(rest[8..12].try_into().expect("4 bytes")) as usize;
        let (block, after) = rest.split_at(32 + control);
        blocks.push(block.to_vec());
        rest = after;
    }
    stream.clear();
    blocks
}

/// The blocks of one direction that wait for the relay, the number of those before them, and the direction.
struct Batch {
    to_server: bool,
    passed: usize,
    blocks: Vec<Vec<u8>>,
}

/// A conversation whose blocks pass through the relay's hands. Returns the ids of a RECV and a CALL, whose right answer
/// is "right".
fn talk(pair: &mut Pair, mut relay: impl FnMut(Batch) -> Vec<Vec<u8>>) -> [u64; 2] {
    let ids = [pair.recv(b"key"), pair.call(7, b"meta", Some(vec![b"inline".to_vec()]), None)];
    let mut passed = [0; 2];
    for _ in 0..8 {
        while pair.client.send(pair.now, &mut pair.to_server) {}
        while pair.server.send(pair.now, &mut pair.to_client) {}
        for (to_server, wire) in [(true, &mut pair.to_server), (false, &mut pair.to_client)] {
            let blocks = blocks(wire);
            let passed = &mut passed[usize::from(to_server)];
            let batch = Batch { to_server, passed: *passed, blocks };
            *passed += batch.blocks.len();
            wire.extend(relay(batch).concat());
        }
        pair.deliver(usize::MAX);
        let requests: Vec<u64> = pair.server.owner.requests.iter().map(Request::id).collect();
        for id in requests {
            assert!(ids.contains(&id), "nobody made request {id}");
            pair.reply(id, 0, b"right", None);
        }
    }
    ids
}

/// The relay was noticed, and before that nothing but the truth was taken in.
fn assert_caught(pair: &Pair, ids: [u64; 2], what: &str) {
    let errors = [&pair.client.error, &pair.server.error];
    assert!(errors.iter().any(|error| error.is_some()), "{what} was not noticed");
    for id in ids {
        if let Some(Ended::Ok { meta, .. }) = pair.client.owner.ended.get(&id) {
            assert_eq!(meta, b"right", "{what}");
        }
    }
    for owner in [&pair.client.owner, &pair.server.owner] {
        assert!(owner.goodbyes.is_empty() && owner.cancelled.is_empty(), "{what}");
        let names = ["/job:worker/task:0", "/job:ps/task:0"];
        assert!(owner.ready.as_ref().is_none_or(|peer| names.contains(&peer.task.as_str())), "{what}");
    }
}

#[test]
fn p36_a_relay_that_changes_nothing_is_not_noticed() {
    let mut pair = pair(&Secret::new(b"secret"), (1, 2));
    let ids = talk(&mut pair, |batch| batch.blocks);
    assert_eq!((&pair.client.error, &pair.server.error), (&None, &None));
    for id in ids {
        assert!(matches!(&pair.client.owner.ended[&id], Ended::Ok { meta, .. } if meta == b"right"));
    }
}

#[test]
fn p36_no_byte_of_a_block_can_be_changed() {
    let secret = Secret::new(b"secret");
    let mut lengths = Vec::new();
    talk(&mut pair(&secret, (1, 2)), |batch| {
        let place = |(at, block): (usize, &Vec<u8>)| (batch.to_server, batch.passed + at, block.len());
        lengths.extend(batch.blocks.iter().enumerate().map(place));
        batch.blocks
    });
    assert!(lengths.len() >= 6, "{lengths:?}");
    for (direction, number, len) in lengths {
        for at in (0..len).filter(|at| !(12..16).contains(at)) {
            let mut pair = pair(&secret, (1, 2));
            let ids = talk(&mut pair, |mut batch| {
                let at_hand = number.checked_sub(batch.passed).filter(|_| batch.to_server == direction);
                if let Some(block) = at_hand.and_then(|number| batch.blocks.get_mut(number)) {
                    block[at] ^= 1;
                    wire::seal(block);
                }
                batch.blocks
            });
            // A longer length only makes the receiver wait: the relay has cut the connection.
            if !(8..12).contains(&at) && !(16..24).contains(&at) {
                assert_caught(&pair, ids, &format!("byte {at} of block {number}"));
            } else {
                assert!(
                    pair.client
                        .owner
                        .ended
                        .values()
                        .all(|end| !matches!(end, Ended::Ok { meta, .. } if meta != b"right"))
                );
            }
        }
    }
}

#[test]
fn p36_blocks_cannot_be_left_out_repeated_exchanged_or_reflected() {
    let secret = Secret::new(b"secret");
    let mut others = Vec::new();
    talk(&mut pair(&secret, (1, 3)), |batch| {
        others.extend(batch.blocks.iter().cloned().map(|block| (batch.to_server, block)));
        batch.blocks
    });
    let mut random = Random::new(1);
    for round in 0..2000 {
        let mut pair = pair(&secret, (1, 2));
        let mut seen: Vec<Vec<u8>> = Vec::new();
        let mut meddled = None;
        let begin = random.below(5) as usize;
        let what = ["repeated", "reflected", "of another connection", "made up", "left out"][round % 5];
        let ids = talk(&mut pair, |mut batch| {
            let sequence = (batch.passed + batch.blocks.len()) as u64;
            let may = meddled.is_none() && batch.passed >= begin;
            let old = seen.get(random.below(seen.len() as u64) as usize).cloned();
            seen.extend(batch.blocks.iter().cloned());
            let numbered = |mut block: Vec<u8>, number: u64| {
                block[24..32].copy_from_slice(&number.to_le_bytes());
                wire::seal(&mut block);
                block
            };
            match what {
                // Once as it was, once with the number that is due.
                "repeated" | "reflected" if may => {
                    if let Some(old) = old {
                        meddled = Some(batch.to_server);
                        let again = if round % 2 == 0 { numbered(old, sequence) } else { old };
                        batch.blocks.push(again);
                    }
                }
                "of another connection" if may => {
                    let alike =
                        |(number, block): &(usize, Vec<u8>)| (*number as u64 == sequence).then(|| block.clone());
                    let same = others.iter().filter(|(to_server, _)| *to_server == batch.to_server);
                    let same: Vec<_> = same.map(|(_, block)| block.clone()).enumerate().collect();
                    if let Some(block) = same.iter().find_map(alike) {
                        meddled = Some(batch.to_server);
                        batch.blocks.push(block);
                    }
                }
                "made up" if may && sequence > 0 => {
                    meddled = Some(batch.to_server);
                    let frame = match (batch.to_server, random.below(3)) {
                        (true, 0) => wire::call(99, &[]),
                        (false, 0) => wire::reply(1, &[]),
                        (_, 1) => wire::RawFrame::new(wire::GOODBYE, 0),
                        _ => wire::RawFrame::new(wire::PING, 1),
                    };
                    let mut section = wire::section(&[frame]);
                    section.extend(random.next().to_le_bytes());
                    section.extend(random.next().to_le_bytes());
                    batch.blocks.push(wire::block(sequence, section, &[]));
                }
                "left out" if may && batch.blocks.len() > 1 => {
                    meddled = Some(batch.to_server);
                    batch.blocks.remove(0);
                }
                _ => {}
            }
            batch.blocks
        });
        if meddled.is_some() {
            assert_caught(&pair, ids, &format!("a block {what} in round {round}"));
        }
    }
}

#[test]
fn p36_whole_connections_cannot_be_replayed_or_reflected() {
    let secret = Secret::new(b"secret");
    let mut recorded = [Vec::new(), Vec::new()];
    talk(&mut pair(&secret, (1, 2)), |batch| {
        recorded[usize::from(batch.to_server)].extend(batch.blocks.concat());
        batch.blocks
    });
    let [from_server, from_client] = recorded;
    // The client's half, to a server with another challenge; the server's half, to a client with another one.
    let mut replayed = pair(&secret, (3, 4));
    replayed.to_server.extend(&from_client);
    replayed.to_client.extend(&from_server);
    replayed.deliver(usize::MAX);
    for end in [&replayed.client, &replayed.server] {
        assert!(matches!(end.error, Some(ConnectionError::Refused { code: 16, .. })), "{:?}", end.error);
        assert!(end.owner.ready.is_none() && end.owner.requests.is_empty());
    }
    // Each side's bytes back to itself; both are given the other's challenge first, or their own.
    for own in [true, false] {
        let mut pair = pair(&secret, (5, 6));
        for _ in 0..4 {
            while pair.client.send(pair.now, &mut pair.to_client) {}
            while pair.server.send(pair.now, &mut pair.to_server) {}
            if !own && pair.client.blocks.len() == 1 {
                std::mem::swap(&mut pair.to_client, &mut pair.to_server);
            }
            pair.deliver(usize::MAX);
        }
        assert!(pair.client.owner.ready.is_none() && pair.server.owner.ready.is_none());
    }
}
