//! What a channel decides, one promise each.

use std::sync::Arc;

use super::channel::{PATIENCE, REMINDER};
use super::*;
use starwire_protocol::{Failure, code};

const LIMIT: Duration = Duration::from_secs(2);

fn channel() -> Channel<()> {
    let data = DataAddress::Derived("h:1".parse().unwrap());
    let peer = Peer { task: "/job:ps/replica:0/task:0".into(), grpc_address: "h:1".into(), data, has_joined: false };
    Channel::new(Arc::new(peer), LIMIT, 1)
}

fn patient(id: u64) -> Waiting<()> {
    Waiting { id, request: (), deadline: None, wait_for_ready: true }
}

fn failure(code: i32, message: &str) -> Failure {
    Failure { code, message: message.into() }
}

fn address(text: &str) -> SocketAddress {
    text.strip_prefix("unix:")
        .map_or_else(|| SocketAddress::Inet(text.parse().unwrap()), |path| SocketAddress::Unix(path.into()))
}

/// What is decided, without wake-ups.
fn decisions(channel: &mut Channel<()>) -> Vec<Do<()>> {
    std::iter::from_fn(|| channel.poll()).filter(|action| !matches!(action, Do::WakeAt(_))).collect()
}

/// The requests that ended, and their errors.
fn ends(channel: &mut Channel<()>) -> Vec<(u64, i32, String)> {
    let each = decisions(channel).into_iter().filter_map(|action| match action {
        Do::End { requests, code, message } => Some((requests, code, message)),
        _ => None,
    });
    each.flat_map(|(requests, code, message)| requests.into_iter().map(move |w| (w.id, code, message.clone())))
        .collect()
}

fn resolve(channel: &mut Channel<()>, addresses: &[&str], now: Instant) {
    assert!(decisions(channel).contains(&Do::Resolve), "no look-up");
    channel.resolved(Ok(addresses.iter().map(|text| address(text)).collect()), now);
}

/// The time of the next attempt after one that fails.
fn fail(channel: &mut Channel<()>, now: Instant) -> Instant {
    resolve(channel, &[], now);
    let wakes = std::iter::from_fn(|| channel.poll()).filter_map(|action| match action {
        Do::WakeAt(at) => Some(at),
        _ => None,
    });
    let at = wakes.last().expect("a wake-up");
    channel.tick(at);
    at
}

fn connect(channel: &mut Channel<()>, conn: u64, now: Instant) {
    resolve(channel, &["10.0.0.1:1"], now);
    channel.connecting(Ok(conn), now);
    channel.ready(conn, 1, now);
}

#[test]
fn back_off_grows_to_half_a_second_and_is_forgotten_on_success() {
    let (mut channel, mut now) = (channel(), Instant::now());
    let in_ms = |range: std::ops::RangeInclusive<u64>, pause: Duration| {
        assert!(range.contains(&(pause.as_millis() as u64)), "{pause:?}");
    };
    channel.submit(patient(1), now);
    for ms in [15..=25, 30..=50, 60..=100, 120..=200, 240..=400, 375..=625, 375..=625] {
        let next = fail(&mut channel, now);
        in_ms(ms, next - now);
        now = next;
    }
    connect(&mut channel, 7, now);
    assert_eq!(channel.connection(), Some(7));
    channel.lost(7, Stage::Handshake, failure(code::UNAVAILABLE, "Socket closed"), now);
    channel.submit(patient(2), now);
    in_ms(15..=25, fail(&mut channel, now) - now);
}

#[test]
fn the_log_hears_of_an_unreachable_peer_only_while_requests_wait() {
    let (mut channel, begin) = (channel(), Instant::now());
    let logs = |channel: &mut Channel<()>, now: Instant| {
        channel.tick(now);
        resolve(channel, &[], now);
        decisions(channel).iter().filter(|action| matches!(action, Do::Log(..))).count()
    };
    channel.submit(patient(1), begin);
    assert_eq!(logs(&mut channel, begin), 0, "too soon");
    assert_eq!(logs(&mut channel, begin + PATIENCE), 1);
    assert_eq!(logs(&mut channel, begin + PATIENCE * 2), 0, "it was said");
    assert_eq!(logs(&mut channel, begin + PATIENCE + REMINDER), 1);
    let later = begin + PATIENCE + REMINDER * 2;
    channel.cancel(1, code::CANCELLED, "");
    channel.submit(Waiting { wait_for_ready: false, ..patient(2) }, later);
    assert_eq!(logs(&mut channel, later), 0, "it ends with the attempt");
    channel.submit(patient(3), later);
    channel.tick(later + REMINDER);
    connect(&mut channel, 7, later + REMINDER);
    channel.lost(7, Stage::Handshake, failure(code::UNAVAILABLE, ""), later + REMINDER);
    channel.submit(patient(4), later + REMINDER);
    assert_eq!(logs(&mut channel, later + REMINDER), 0, "a new outage");
}

#[test]
fn a_deadline_during_a_later_attempt_names_the_last_failed_one() {
    let (mut channel, now) = (channel(), Instant::now());
    let with_deadline = |id, ms| Waiting { deadline: Some(now + Duration::from_millis(ms)), ..patient(id) };
    channel.submit(with_deadline(1, 1), now);
    channel.tick(now + Duration::from_millis(1));
    let [(1, code::DEADLINE_EXCEEDED, message)] = &ends(&mut channel)[..] else { panic!("no deadline") };
    assert!(message.ends_with("(no attempt has failed yet)"), "{message}");

    channel = self::channel();
    channel.submit(with_deadline(2, 1000), now);
    resolve(&mut channel, &["10.0.0.1:1", "10.0.0.2:1"], now);
    channel.connecting(Err("refused".into()), now);
    channel.connecting(Err("unreachable".into()), now);
    assert_eq!(ends(&mut channel), []);
    // The next attempt looks up the name when the deadline passes.
    channel.tick(now + Duration::from_millis(100));
    assert!(matches!(decisions(&mut channel)[..], [Do::Resolve]));
    channel.tick(now + Duration::from_secs(1));
    let [(2, code::DEADLINE_EXCEEDED, message)] = &ends(&mut channel)[..] else { panic!("no deadline") };
    assert!(message.ends_with("(10.0.0.1:1: refused; 10.0.0.2:1: unreachable)"), "{message}");
}

#[test]
fn each_address_that_hangs_is_given_up_and_named() {
    let (mut channel, begin) = (channel(), Instant::now());
    channel.submit(Waiting { wait_for_ready: false, ..patient(1) }, begin);
    resolve(&mut channel, &["10.0.0.1:1", "10.0.0.2:1", "10.0.0.3:1"], begin);
    let mut now = begin;
    for conn in 0..3 {
        assert!(matches!(decisions(&mut channel).last(), Some(Do::Connect { .. })), "{conn}");
        channel.connecting(Ok(conn), now);
        channel.tick(now + LIMIT - Duration::from_millis(1));
        assert_eq!(decisions(&mut channel), [], "{conn}: too soon");
        now += LIMIT;
        channel.tick(now);
        assert_eq!(decisions(&mut channel), [Do::Close(conn, "timed out connecting")]);
        let stage = if conn == 1 { Stage::Handshake } else { Stage::Connect };
        channel.lost(conn, stage, failure(code::UNAVAILABLE, "timed out connecting"), now);
    }
    let [(1, code::UNAVAILABLE, message)] = &ends(&mut channel)[..] else { panic!("no end") };
    let each = [1, 2, 3].map(|host| format!("10.0.0.{host}:1: timed out connecting"));
    assert!(message.ends_with(&each.join("; ")), "{message}");
}

#[test]
fn the_next_attempt_waits_for_a_look_up_that_hangs() {
    let (mut channel, mut now) = (channel(), Instant::now());
    channel.submit(patient(1), now);
    assert_eq!(decisions(&mut channel), [Do::Resolve]);
    for _ in 0..3 {
        now += LIMIT;
        channel.tick(now);
        now += Duration::from_secs(1);
        channel.tick(now);
        let found = decisions(&mut channel);
        assert!(found.contains(&Do::CountFailedAttempt) && !found.contains(&Do::Resolve), "{found:?}");
    }
    channel.resolved(Ok(vec![address("10.0.0.1:1")]), now);
    assert!(matches!(decisions(&mut channel)[..], [Do::Connect { .. }]), "the late answer counts");
}

#[test]
fn a_late_look_up_opens_no_connection_for_a_server_that_stops() {
    let (mut channel, now) = (channel(), Instant::now());
    channel.submit(patient(1), now);
    channel.stop(now);
    assert_eq!(ends(&mut channel).len(), 1);
    channel.resolved(Ok(vec![address("10.0.0.1:1")]), now);
    assert_eq!(decisions(&mut channel), []);
}

#[test]
fn only_requests_that_wait_survive_an_attempt_and_only_if_another_one_may_help() {
    for (code, is_final) in [(code::UNAVAILABLE, false), (code::FAILED_PRECONDITION, true)] {
        let (mut channel, now) = (channel(), Instant::now());
        channel.submit(patient(1), now);
        channel.submit(Waiting { wait_for_ready: false, ..patient(2) }, now);
        resolve(&mut channel, &["10.0.0.1:1"], now);
        channel.connecting(Ok(5), now);
        channel.lost(5, Stage::Handshake, failure(code, "no"), now);
        let ended: Vec<u64> = ends(&mut channel).into_iter().map(|(id, ..)| id).collect();
        assert_eq!(ended, if is_final { vec![1, 2] } else { vec![2] });
    }
}

#[test]
fn connections_that_are_cut_in_the_handshake_are_made_again_for_a_peer_that_was_there() {
    let (mut channel, mut now) = (channel(), Instant::now());
    channel.submit(patient(1), now);
    connect(&mut channel, 1, now);
    channel.lost(1, Stage::Handshake, failure(code::UNAVAILABLE, "reset"), now);
    decisions(&mut channel);
    channel.submit(Waiting { wait_for_ready: false, ..patient(2) }, now);
    for conn in 2..6 {
        channel.tick(now);
        let found = decisions(&mut channel);
        assert!(found.contains(&Do::Resolve) && !found.iter().any(|action| matches!(action, Do::End { .. })), "{conn}");
        channel.resolved(Ok(vec![address("10.0.0.1:1")]), now);
        channel.connecting(Ok(conn), now);
        channel.lost(conn, Stage::Handshake, failure(code::UNAVAILABLE, "reset"), now);
        now += Duration::from_secs(1);
    }
    assert_eq!(ends(&mut channel).len(), 1, "at most so often");
    channel.submit(Waiting { wait_for_ready: false, ..patient(3) }, now);
    channel.tick(now);
    resolve(&mut channel, &["10.0.0.1:1"], now);
    channel.connecting(Err("refused".into()), now);
    assert_eq!(ends(&mut channel).len(), 1, "nobody is there");
}

#[test]
fn a_peer_that_has_moved_is_looked_up_where_it_says_until_that_fails() {
    let (mut channel, now) = (channel(), Instant::now());
    let moves = |channel: &mut Channel<()>, conn, to| {
        resolve(channel, &["10.0.0.1:1"], now);
        channel.connecting(Ok(conn), now);
        channel.moved(conn, to, now);
        // The connection that said so is closed.
        channel.lost(conn, Stage::Handshake, failure(code::UNAVAILABLE, "moved"), now);
    };
    channel.submit(patient(1), now);
    moves(&mut channel, 1, "new:2");
    assert_eq!(channel.address().to_string(), "new:2");
    connect(&mut channel, 2, now);
    channel.lost(2, Stage::Handshake, failure(code::UNAVAILABLE, "reset"), now);
    channel.submit(patient(2), now);
    resolve(&mut channel, &["10.0.0.2:2"], now);
    channel.connecting(Err("refused".into()), now);
    assert_eq!(channel.address().to_string(), "h:1", "whoever is there may know better");
}

#[test]
fn a_peer_that_moves_on_and_on_is_looked_up_where_it_was_first_after_a_pause() {
    let (mut channel, now) = (channel(), Instant::now());
    channel.submit(patient(1), now);
    let moves = |channel: &mut Channel<()>, conn: u64| {
        resolve(channel, &["10.0.0.1:1"], now);
        channel.connecting(Ok(conn), now);
        channel.moved(conn, &format!("new:{conn}"), now);
    };
    for conn in 1..=4 {
        moves(&mut channel, conn);
        assert_eq!(channel.address().to_string(), format!("new:{conn}"), "at once");
    }
    moves(&mut channel, 5);
    assert_eq!(channel.address().to_string(), "h:1");
    assert!(!decisions(&mut channel).contains(&Do::Resolve), "there is a pause");
    channel.tick(now + Duration::from_secs(1));
    // The count begins anew.
    moves(&mut channel, 6);
    assert_eq!(channel.address().to_string(), "new:6");
}

#[test]
fn a_peer_that_is_in_two_places_is_an_error() {
    let (mut channel, now) = (channel(), Instant::now());
    channel.submit(Waiting { wait_for_ready: false, ..patient(1) }, now);
    for conn in 1..6 {
        resolve(&mut channel, &["10.0.0.1:1"], now);
        channel.connecting(Ok(conn), now);
        channel.moved(conn, if conn % 2 == 0 { "a:1" } else { "b:1" }, now);
    }
    let [(1, code::UNAVAILABLE, message)] = &ends(&mut channel)[..] else { panic!("no end") };
    assert!(message.ends_with("it has moved again and again, at last to b:1"), "{message}");
    assert_eq!(channel.address().to_string(), "h:1");
    channel = self::channel();
    channel.submit(Waiting { wait_for_ready: false, ..patient(1) }, now);
    resolve(&mut channel, &["10.0.0.1:1"], now);
    channel.connecting(Ok(9), now);
    channel.moved(9, "nowhere", now);
    let [(1, code::UNAVAILABLE, message)] = &ends(&mut channel)[..] else { panic!("no end") };
    assert!(message.ends_with(r#"it has moved to "nowhere": the port is missing (host:port)"#), "{message}");
}

#[test]
fn a_unix_socket_of_another_server_is_passed_over() {
    let (mut channel, now) = (channel(), Instant::now());
    channel.submit(Waiting { wait_for_ready: false, ..patient(1) }, now);
    resolve(&mut channel, &["unix:@a", "unix:@b", "10.0.0.1:1"], now);
    channel.connecting(Err("no such socket".into()), now);
    channel.connecting(Ok(1), now);
    channel.lost(1, Stage::Handshake, failure(code::FAILED_PRECONDITION, "another task"), now);
    channel.connecting(Err("refused".into()), now);
    let [(1, code::UNAVAILABLE, message)] = &ends(&mut channel)[..] else { panic!("no end") };
    assert!(message.ends_with("all addresses: another task; 10.0.0.1:1: refused"), "{message}");
}

#[test]
fn an_address_is_tried_again_without_rdma() {
    let (mut channel, now) = (channel(), Instant::now());
    channel.submit(patient(1), now);
    resolve(&mut channel, &["10.0.0.1:1", "10.0.0.2:1"], now);
    let offers = |channel: &mut Channel<()>| {
        decisions(channel).into_iter().find_map(|action| match action {
            Do::Connect { address, with_pairs } => Some((address.to_string(), with_pairs)),
            _ => None,
        })
    };
    assert_eq!(offers(&mut channel), Some(("10.0.0.1:1".into(), true)));
    channel.connecting(Ok(1), now);
    channel.lost(1, Stage::Migration, failure(code::UNAVAILABLE, "nothing arrives"), now);
    assert_eq!(offers(&mut channel), Some(("10.0.0.1:1".into(), false)));
    channel.connecting(Ok(2), now);
    channel.pairs_work();
    channel.lost(2, Stage::Handshake, failure(code::UNAVAILABLE, ""), now);
    assert_eq!(offers(&mut channel), Some(("10.0.0.2:1".into(), true)));
}
