//! The log against a worker and a network that repeat, delay and lose.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

const MOST: usize = 4;

fn call_id(lane: u32, attempt: u32, number: u64) -> CallId {
    CallId { lane, attempt, number: NonZeroU64::new(number).unwrap() }
}

fn ticket(conn: u64) -> Ticket {
    Ticket { conn, id: 1 }
}

fn reply(number: u64) -> KeptReply {
    KeptReply { code: 0, meta: number.to_le_bytes().to_vec(), parts: vec![b"part".to_vec()] }
}

fn end(log: &mut CallLog, lane: u32, number: u64) -> Option<Ticket> {
    log.end(lane, NonZeroU64::new(number).unwrap(), || Some(reply(number)))
}

#[test]
fn a_call_that_comes_again_gets_the_reply_of_its_run() {
    let mut log = CallLog::complete();
    assert_eq!(log.begin(call_id(0, 0, 1), ticket(1), MOST), Ok(Begin::Run));
    assert_eq!(log.begin(call_id(0, 1, 1), ticket(2), MOST), Ok(Begin::Waits));
    assert_eq!(end(&mut log, 0, 1), Some(ticket(2)));
    assert_eq!(log.begin(call_id(0, 2, 1), ticket(3), MOST), Ok(Begin::Repeat(reply(1))));
    assert_eq!(log.begin(call_id(0, 3, 1), ticket(4), MOST), Ok(Begin::Repeat(reply(1))), "as often as needed");
    // It never arrived.
    assert_eq!(log.begin(call_id(1, 1, 2), ticket(4), MOST), Ok(Begin::Run));
    assert_eq!(end(&mut log, 1, 2), None);
    assert_eq!(log.begin(call_id(0, 0, 3), ticket(4), MOST), Ok(Begin::Run), "the next call of the lane");
    assert_eq!(end(&mut log, 0, 1), None, "an end twice");
}

#[test]
fn what_was_sent_over_a_connection_that_the_worker_gave_up_comes_too_late() {
    let mut log = CallLog::complete();
    log.begin(call_id(0, 1, 1), ticket(2), MOST).unwrap();
    assert_eq!(log.begin(call_id(0, 0, 1), ticket(1), MOST), Err(Refused::Superseded));
    end(&mut log, 0, 1);
    assert_eq!(log.begin(call_id(0, 0, 1), ticket(1), MOST), Err(Refused::Superseded));
    log.begin(call_id(0, 0, 2), ticket(2), MOST).unwrap();
    assert_eq!(log.begin(call_id(0, 5, 1), ticket(1), MOST), Err(Refused::Superseded));
    assert_eq!(end(&mut log, 0, 2), None);
}

fn saved(log: &CallLog) -> CallLog {
    let mut bytes = Vec::new();
    log.save(&mut bytes);
    for end in 0..bytes.len() {
        assert!(CallLog::load(&mut Reader(&bytes[..end])).is_none(), "{end} bytes");
    }
    let mut rest = Reader(&bytes);
    let loaded = CallLog::load(&mut rest).unwrap();
    assert!(rest.0.is_empty());
    loaded
}

#[test]
fn a_log_that_was_saved_knows_the_same_calls() {
    let mut log = CallLog::complete();
    for lane in 0..3 {
        log.begin(call_id(lane, 0, u64::from(lane) + 1), ticket(1), MOST).unwrap();
    }
    end(&mut log, 0, 1);
    log.end(1, NonZeroU64::new(2).unwrap(), || None);
    let mut log = saved(&log);
    assert_eq!(log.begin(call_id(0, 1, 1), ticket(2), MOST), Ok(Begin::Repeat(reply(1))));
    assert_eq!(log.begin(call_id(1, 1, 2), ticket(2), MOST), Err(Refused::MayHaveRun));
    assert_eq!(log.begin(call_id(2, 1, 3), ticket(2), MOST), Err(Refused::MayHaveRun), "it was running");
    assert_eq!(log.begin(call_id(3, 1, 4), ticket(2), MOST), Ok(Begin::Run), "it was lost");
    log.forget();
    let mut log = saved(&log);
    assert_eq!(log.begin(call_id(0, 2, 1), ticket(3), MOST), Err(Refused::MayHaveRun));
    assert_eq!(log.begin(call_id(0, 0, 5), ticket(3), MOST), Ok(Begin::Run));
    assert_eq!(saved(&CallLog::incomplete()).begin(call_id(0, 1, 1), ticket(4), MOST), Err(Refused::MayHaveRun));
}

#[test]
fn nothing_runs_twice_because_it_was_forgotten() {
    let mut log = CallLog::complete();
    log.begin(call_id(0, 0, 1), ticket(1), MOST).unwrap();
    log.begin(call_id(1, 0, 2), ticket(1), MOST).unwrap();
    end(&mut log, 0, 1);
    log.forget();
    assert_eq!(end(&mut log, 1, 2), None);
    for number in [1, 2] {
        assert_eq!(log.begin(call_id(0, 1, number), ticket(2), MOST), Err(Refused::MayHaveRun));
    }
    assert_eq!(log.begin(call_id(0, 1, 3), ticket(2), MOST), Ok(Begin::Run), "it never arrived");
    let mut unknown = CallLog::incomplete();
    assert_eq!(unknown.begin(call_id(0, 1, 1), ticket(1), MOST), Err(Refused::MayHaveRun));
    assert_eq!(unknown.begin(call_id(0, 0, 2), ticket(1), MOST), Ok(Begin::Run));
    assert_eq!(unknown.begin(call_id(0, 1, 2), ticket(2), MOST), Ok(Begin::Waits));
}

#[test]
fn a_reply_that_is_too_long_is_not_made_up_for() {
    let mut log = CallLog::complete();
    log.begin(call_id(0, 0, 1), ticket(1), MOST).unwrap();
    assert_eq!(log.end(0, NonZeroU64::new(1).unwrap(), || None), None);
    assert_eq!(log.begin(call_id(0, 1, 1), ticket(2), MOST), Err(Refused::MayHaveRun));
}

#[test]
fn a_call_that_waits_for_its_run_is_not_forgotten() {
    let mut log = CallLog::complete();
    assert_eq!(log.begin(call_id(0, 0, 1), ticket(1), 1), Ok(Begin::Run));
    assert_eq!(log.begin(call_id(0, 1, 1), ticket(2), 1), Ok(Begin::Waits));
    assert_eq!(log.begin(call_id(1, 0, 2), ticket(2), 1), Ok(Begin::Run));
    assert_eq!(end(&mut log, 0, 1), Some(ticket(2)));
    assert_eq!(end(&mut log, 1, 2), None);
    assert_eq!(log.begin(call_id(2, 0, 3), ticket(2), 1), Ok(Begin::Run));
    assert_eq!((log.lanes.len(), log.bytes()), (1, 0), "what is over goes");
    assert_eq!(log.begin(call_id(1, 1, 2), ticket(3), 1), Err(Refused::MayHaveRun));
}

#[derive(Clone, Debug)]
enum Event {
    /// The worker makes a call.
    Call,
    /// It loses its connection: what is in flight is sent again, the rest of it may still arrive.
    Lose,
    /// A request arrives: which one of those on their way.
    Arrive(usize),
    /// A run ends.
    End(usize),
    Forget,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        6 => Just(Event::Call),
        2 => Just(Event::Lose),
        10 => any::<usize>().prop_map(Event::Arrive),
        8 => any::<usize>().prop_map(Event::End),
        1 => Just(Event::Forget),
    ];
    proptest::collection::vec(event, 0..200)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// In any history: no call runs twice, and the worker gets an answer, which is the reply of its own call's run.
    #[test]
    fn no_call_runs_twice(events in events()) {
        let mut log = CallLog::complete();
        // The worker: calls in flight by lane, and its connection.
        let mut flying: BTreeMap<u32, CallId> = BTreeMap::new();
        let (mut numbers, mut conn) = (0, 1);
        let mut on_their_way: Vec<(CallId, u64)> = Vec::new();
        let mut running: Vec<(CallId, Ticket)> = Vec::new();
        let mut ran = BTreeSet::new();
        // Calls of the worker that wait for a run, by lane; the most that have run at a time.
        let (mut waiting, mut peak) = (BTreeSet::new(), 0);
        for event in events {
            match event {
                Event::Call => {
                    let lane = (0..).find(|lane| !flying.contains_key(lane)).unwrap();
                    if flying.len() < 2 * MOST {
                        numbers += 1;
                        flying.insert(lane, call_id(lane, 0, numbers));
                        on_their_way.push((flying[&lane], conn));
                    }
                }
                Event::Lose => {
                    conn += 1;
                    waiting.clear();
                    for call_id in flying.values_mut() {
                        call_id.attempt += 1;
                        on_their_way.push((*call_id, conn));
                    }
                }
                Event::Arrive(which) if !on_their_way.is_empty() => {
                    let (call_id, from) = on_their_way.remove(which % on_their_way.len());
                    let awaited = flying.get(&call_id.lane) == Some(&call_id) && from == conn;
                    match log.begin(call_id, ticket(from), MOST) {
                        Ok(Begin::Run) => {
                            prop_assert!(ran.insert(call_id.number), "{call_id:?} runs twice");
                            running.push((call_id, ticket(from)));
                        }
                        Ok(Begin::Waits) => {
                            prop_assert!(running.iter().any(|(run, _)| run.number == call_id.number));
                            if awaited {
                                waiting.insert(call_id.lane);
                            }
                        }
                        Ok(Begin::Repeat(kept)) => {
                            prop_assert_eq!(kept, reply(call_id.number.get()));
                            if awaited {
                                flying.remove(&call_id.lane);
                            }
                        }
                        Err(refused) => {
                            prop_assert!(!awaited || refused == Refused::MayHaveRun, "{call_id:?}: {refused}");
                            if awaited {
                                flying.remove(&call_id.lane);
                            }
                        }
                    }
                }
                Event::End(which) if !running.is_empty() => {
                    let (run, first) = running.swap_remove(which % running.len());
                    let number = run.number.get();
                    let to = log.end(run.lane, run.number, || Some(reply(number))).unwrap_or(first);
                    // Only the connection that the worker has now leads to it.
                    if to.conn == conn && flying.get(&run.lane).is_some_and(|call_id| call_id.number == run.number) {
                        flying.remove(&run.lane);
                        waiting.remove(&run.lane);
                    }
                    let hangs = waiting.contains(&run.lane)
                        && flying.get(&run.lane).is_some_and(|call_id| call_id.number == run.number);
                    prop_assert!(!hangs, "nobody answers {run:?}");
                }
                // Without a connection for long: nothing is on its way.
                Event::Forget if on_their_way.is_empty() => {
                    log.forget();
                    waiting.clear();
                }
                _ => {}
            }
            peak = peak.max(running.len());
            prop_assert!(log.lanes.len() <= MOST.max(peak));
        }
    }
}
