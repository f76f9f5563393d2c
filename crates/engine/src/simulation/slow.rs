//! Transfers that take far longer than a peer may be silent, and what is left of one.

use std::sync::atomic::Ordering;
use std::time::Duration;

use super::bytes::bytes_of;
use super::owner::{Any, Open, Request, payload, reply_meta, value};
use super::requests::{Kind, Need};
use super::setup::Setup;
use super::{Task, World};
use crate::api::PendingOp;
use crate::command::{NewCall, NewRecv};
use crate::shard::Shard;

/// Of a peer: a second until it is asked, and half a second to answer.
const AFTER_MS: u64 = 1000;
const TIMEOUT_MS: u64 = 500;
/// Bytes in a second. A block takes many times as long, the kernel's buffers a fraction.
const RATE: u32 = 1 << 20;
const MUCH: usize = 24 << 20;
/// Pieces in a list that is not long.
const FEW: usize = 64;
const LONG: Duration = Duration::from_secs(3600);

impl World {
    /// Two connected tasks, between which bytes pass slowly from now on.
    fn slow(has_tls: bool) -> Self {
        let mut world = Self::new(Setup::quiet(AFTER_MS, TIMEOUT_MS, has_tls));
        world.request_all(Need::Now);
        world.net.borrow_mut().rate = Some(RATE);
        world
    }

    /// A request of the first task to the second one, with much in the reply (a RECV) or in both (a call, which has so
    /// many parts).
    fn request_much(&mut self, kind: Kind, parts: u64, need: Need) {
        self.next += 1;
        let id = self.next;
        let open = Open { from: 0, is_cancelled: false, has_buffers: false, not_before: None, due: None };
        let ledger = self.ledger.clone();
        ledger.lock().unwrap().open.insert(id, open);
        let op = |meta, parts| {
            let route = (0, 1, kind);
            PendingOp::new(Any::Plain(Request { id, ledger, route, need, meta, parts, refuses: false }))
        };
        let task = &self.tasks[0];
        if kind == Kind::Recv {
            let prefix = format!("key;0;{MUCH}").into_bytes();
            let op = op(reply_meta(&prefix, 1, 0, 0, false), value(&prefix, 1, 0, 0));
            task.channels[1].recv(NewRecv { step: 1, prefix: prefix.into(), frame: 0, iter: 0, op });
        } else {
            let meta = id.to_le_bytes().to_vec();
            let size = MUCH / parts as usize;
            let parts: Vec<Vec<u8>> = (0..parts).map(|part| bytes_of(id << 2 | part, size)).collect();
            let op = op(meta.clone(), parts.clone());
            let payload = payload(parts, &task.shared.host.payloads);
            let (method, deadline_ms, wait_for_ready, deadline_to_connect) = (7, 0, true, false);
            let call = NewCall { method, meta, payload, deadline_ms, wait_for_ready, deadline_to_connect, op };
            task.channels[1].call(call);
        }
        task.shared.host.ask();
    }

    /// Until the request has ended on both sides, but not for longer than this. Returns whether it has.
    fn pass_for(&mut self, time: Duration) -> bool {
        let until = self.now + time;
        while self.now < until && !self.is_done() {
            self.answer(1, true);
            self.pass(until);
        }
        self.is_done()
    }

    fn is_done(&self) -> bool {
        let is_released = |task: &Task| task.shared.host.payloads.load(Ordering::Relaxed) == 0;
        self.ledger.lock().unwrap().open.is_empty() && self.tasks.iter().all(is_released)
    }

    /// How many peers each task has found silent.
    fn silences(&self) -> [i64; 2] {
        [0, 1].map(|task| self.metrics(task, ["keepalive_losses_total"])[0])
    }

    fn end_slow(mut self) {
        let mut net = self.net.borrow_mut();
        net.heal();
        net.rate = None;
        drop(net);
        for task in 0..2 {
            self.stop(task);
            self.check_requests(task);
        }
        std::mem::take(&mut self.tasks).into_iter().for_each(|task| self.check_release(task));
    }
}

#[test]
fn a_slow_transfer_is_not_taken_for_silence() {
    for has_tls in [false, true] {
        for kind in [Kind::Recv, Kind::Call] {
            let mut world = World::slow(has_tls);
            let began = world.now;
            world.request_much(kind, 1, Need::Now);
            assert!(world.pass_for(LONG) && world.now - began > Duration::from_secs(20), "it is slow");
            assert_eq!(world.silences(), [0, 0]);
            world.end_slow();
        }
    }
}

#[test]
fn a_peer_that_vanishes_in_a_transfer_is_noticed() {
    for has_tls in [false, true] {
        for kind in [Kind::Recv, Kind::Call] {
            let mut world = World::slow(has_tls);
            world.request_much(kind, 1, Need::None);
            assert!(!world.pass_for(Duration::from_secs(5)), "it is under way");
            let until = world.now + LONG;
            world.net.borrow_mut().partition(0, 1, until);
            // A second for what is on its way, and one for the peer to take the reason.
            assert!(world.pass_for(Duration::from_millis(AFTER_MS + TIMEOUT_MS + 2000)), "both sides have noticed");
            assert!(world.silences().iter().all(|count| *count > 0));
            world.end_slow();
        }
    }
}

#[test]
fn reactors_without_connections_do_not_hold_up_the_end() {
    let mut world = World::new(Setup::quiet(AFTER_MS, TIMEOUT_MS, false));
    let began = world.now;
    world.stop(0);
    assert!(world.now - began < Duration::from_millis(10));
}

#[test]
fn an_idle_connection_keeps_no_long_lists() {
    let mut world = World::slow(false);
    world.net.borrow_mut().rate = None;
    world.request_much(Kind::Call, 500, Need::Now);
    assert!(world.pass_for(LONG));
    let room = |world: &World| world.tasks.iter().flat_map(|task| &task.shards).map(Shard::room).max().unwrap();
    assert!(room(&world) > FEW, "they are long after it");
    // Both are asked whether they are still there.
    let until = world.now + Duration::from_millis(2 * AFTER_MS);
    while world.now < until {
        world.pass(until);
    }
    assert!(room(&world) <= FEW);
    world.end_slow();
}
