//! The table of kept values against a model, over random histories.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

use proptest::prelude::*;

use super::super::accounts::Accounts;
use super::*;

const LIMITS: StepLimits = StepLimits { values: 6, bytes: 60, calls: 4, all_bytes: 100 };

/// Connections 0 and 1 are of one peer.
fn peer_of(connection: u64) -> u64 {
    connection / 2
}

#[derive(Clone, Debug)]
enum Event {
    Came(u64),
    Gone(u64),
    Begin(u64, i64, bool),
    /// A call in flight, and whether it is the step's last.
    End(usize, bool),
    Keep(u64, i64, u32, u64),
    StepEnd(u64, i64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let connection = 0..3u64;
    let step = 0..3i64;
    let event = prop_oneof![
        1 => connection.clone().prop_map(Event::Came),
        1 => connection.clone().prop_map(Event::Gone),
        6 => (connection.clone(), step.clone(), any::<bool>()).prop_map(|(c, s, k)| Event::Begin(c, s, k)),
        6 => (any::<usize>(), any::<bool>()).prop_map(|(i, last)| Event::End(i, last)),
        8 => (connection.clone(), step.clone(), 0..4u32, 0..30u64).prop_map(|(c, s, n, b)| Event::Keep(c, s, n, b)),
        2 => (connection, step).prop_map(|(c, s)| Event::StepEnd(c, s)),
    ];
    proptest::collection::vec(event, 0..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// In any history: limits hold, each value is dropped once, no connection sees another's values, and when all
    /// connections and calls are over nothing is left.
    #[test]
    fn nothing_leaks_and_limits_hold(events in events()) {
        let mut table = Steps::new(LIMITS);
        let (accounts, now) = (Accounts::default(), Instant::now());
        let alive = Rc::new(());
        // Connection, step, whether it keeps values, whether its step is on record.
        let mut calls: Vec<(u64, i64, bool, bool)> = Vec::new();
        // The values that must be there: (connection, step, slot) -> number of the value.
        let mut model: BTreeMap<(u64, i64, u32), u64> = BTreeMap::new();
        let mut present = std::collections::BTreeSet::new();
        let mut numbers = 0;
        for event in events {
            match event {
                Event::Came(connection) => {
                    // The engine never reuses a number without reporting that the first is gone.
                    if present.insert(connection) {
                        let peer = peer_of(connection);
                        table.peer_came(connection, accounts.came(&format!("/job:worker/task:{peer}"), 1, now));
                    }
                }
                Event::Gone(connection) => {
                    present.remove(&connection);
                    let dropped = table.peer_gone(connection).len();
                    let before = model.len();
                    model.retain(|(c, ..), _| *c != connection);
                    prop_assert_eq!(dropped, before - model.len());
                    calls.retain(|(c, ..)| *c != connection);
                }
                Event::Begin(connection, step, keeps) => {
                    let mine = calls.iter().filter(|(c, ..)| peer_of(*c) == peer_of(connection)).count() as u64;
                    let began = table.call_began(connection, step, keeps);
                    match began {
                        Ok(on_record) => {
                            prop_assert!(on_record || !keeps);
                            calls.push((connection, step, keeps, on_record));
                        }
                        Err(Refused::Gone) => prop_assert!(!present.contains(&connection)),
                        Err(Refused::Calls { peer, max }) => {
                            prop_assert!(mine == max && peer.ends_with(&peer_of(connection).to_string()));
                        }
                        Err(other) => prop_assert!(false, "{other}"),
                    }
                }
                Event::End(which, last) if !calls.is_empty() => {
                    let (connection, step, _, on_record) = calls.swap_remove(which % calls.len());
                    let dropped = table.call_ended(connection, step, on_record, last).len();
                    let before = model.len();
                    if last {
                        model.retain(|(c, s, _), _| (*c, *s) != (connection, step));
                    }
                    prop_assert_eq!(dropped, before - model.len());
                }
                Event::End(..) => {}
                Event::Keep(connection, step, slot, bytes) => {
                    // Only calls keep.
                    if !calls.contains(&(connection, step, true, true)) {
                        continue;
                    }
                    numbers += 1;
                    let values = model.keys().filter(|(c, ..)| peer_of(*c) == peer_of(connection)).count() as u64;
                    match table.keep(connection, step, slot, (numbers, alive.clone()), bytes) {
                        Ok(Some((number, _))) if number == numbers => {}
                        Ok(old) => {
                            let expected = model.insert((connection, step, slot), numbers);
                            prop_assert_eq!(old.map(|(number, _)| number), expected);
                        }
                        Err((_, Refused::Values { values: wanted, bytes, .. })) => {
                            prop_assert!(wanted > LIMITS.values || bytes > LIMITS.bytes);
                            prop_assert!(wanted <= values + 1);
                        }
                        Err((_, Refused::Left { bytes, left, .. })) => prop_assert!(bytes > left),
                        Err((_, other)) => prop_assert!(false, "{other}"),
                    }
                    let of = |peer| (0..3).filter(move |c| peer_of(*c) == peer).filter_map(|c| table.peers.get(&c));
                    for peer in 0..2 {
                        let has = of(peer).fold((0, 0), |(v, b), p| (v + p.values, b + p.bytes));
                        prop_assert!(has.0 <= LIMITS.values && has.1 <= LIMITS.bytes);
                    }
                }
                Event::StepEnd(connection, step) => {
                    let dropped = table.step_ended(connection, step).len();
                    let before = model.len();
                    model.retain(|(c, s, _), _| (*c, *s) != (connection, step));
                    prop_assert_eq!(dropped, before - model.len());
                }
            }
            prop_assert_eq!(table.len(), model.len() as u64);
            prop_assert_eq!(Rc::strong_count(&alive) - 1, model.len());
            for ((connection, step, slot), number) in &model {
                prop_assert_eq!(table.slots(*connection, *step).get(*slot).map(|(n, _)| *n), Some(*number));
            }
        }
        for (connection, step, _, on_record) in calls {
            table.call_ended(connection, step, on_record, false);
        }
        prop_assert!(table.peers.values().all(|peer| peer.calls == 0));
        prop_assert_eq!(table.len(), model.len() as u64, "whatever its age");
        // Steps end one by one, or with their connection.
        for ((connection, step, _), _) in std::mem::take(&mut model) {
            match connection {
                0 => drop(table.step_ended(connection, step)),
                _ => drop(table.peer_gone(connection)),
            }
        }
        prop_assert!(table.is_empty());
        prop_assert!(table.peers.values().all(|peer| peer.steps.is_empty() && peer.bytes == 0));
        let left = (0..2).map(|peer| accounts.came(&format!("/job:worker/task:{peer}"), 1, now).has());
        prop_assert_eq!(left.collect::<Vec<_>>(), [(0, 0, 0); 2]);
        prop_assert_eq!(Rc::strong_count(&alive), 1);
    }
}

#[test]
fn what_a_call_keeps_after_its_step_has_ended_goes_at_once() {
    let mut table = Steps::new(LIMITS);
    table.peer_came(1, Accounts::default().came("worker", 1, Instant::now()));
    table.call_began(1, 7, true).unwrap();
    table.step_ended(1, 7);
    assert_eq!(table.keep(1, 7, 0, "late", 5).unwrap(), Some("late"));
    table.call_ended(1, 7, true, false);
    assert!(table.is_empty());
    assert!(table.peers[&1].steps.is_empty());
}

#[test]
fn refusals_name_the_peer() {
    let mut table = Steps::new(StepLimits { values: 1, ..LIMITS });
    table.peer_came(1, Accounts::default().came("/job:worker/replica:0/task:3", 1, Instant::now()));
    table.call_began(1, 7, true).unwrap();
    table.keep(1, 7, 0, "a", 5).unwrap();
    let (_, refused) = table.keep(1, 7, 1, "b", 5).unwrap_err();
    assert_eq!(
        refused.to_string(),
        "starwire: /job:worker/replica:0/task:3 keeps 2 values of 10 bytes on this server, at most 1 of 60 bytes are allowed \
         (STARWIRE_STAR_LIMITS=values=…,value_bytes=…)"
    );
}
