//! The table of plans over random histories of sessions, registrations and time.

use std::rc::{Rc, Weak};

use proptest::prelude::*;

use super::*;

const LIMITS: PlanLimits = PlanLimits {
    plans: 4,
    bytes: 100,
    all_bytes: 150,
    plan_idle: Duration::from_secs(60),
    session_idle: Duration::from_secs(600),
};

fn at(seconds: u64) -> Time {
    Duration::from_secs(seconds)
}

fn hash(n: u8) -> Hash {
    [n; 32]
}

fn session(n: u8) -> Vec<u8> {
    format!("session {n}").into_bytes()
}

/// Sessions with an odd number from 5 on have their own devices; plans with an odd number have state.
fn isolated(n: u8) -> bool {
    n >= 5
}

fn has_state(plan: u8) -> bool {
    plan % 2 == 1
}

#[derive(Clone, Debug)]
enum Event {
    Use {
        session: u8,
        plan: u8,
    },
    /// One of the compilations under way ends; false: it failed.
    Compiled(usize, bool),
    Closed(u8),
    Later(u64),
    Clear,
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let event = prop_oneof![
        12 => (0..7u8, 0..8u8).prop_map(|(session, plan)| Event::Use { session, plan }),
        8 => (any::<usize>(), proptest::bool::weighted(0.8)).prop_map(|(which, good)| Event::Compiled(which, good)),
        1 => (0..7u8).prop_map(Event::Closed),
        1 => (0..100u64).prop_map(Event::Later),
        1 => (500..900u64).prop_map(Event::Later),
        1 => Just(Event::Clear),
    ];
    proptest::collection::vec(event, 0..150)
}

/// A plan: its id, its session if it is not shared, and whether it is alive.
type Value = Rc<(u8, Option<u8>)>;
/// Plans by session and number.
type Cache = HashMap<(u8, u8), Weak<(u8, Option<u8>)>>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn plans_are_shared_and_nothing_leaks(events in events()) {
        let mut table: Plans<Value, (u8, u8)> = Plans::new(LIMITS);
        let mut compiling: Vec<(u8, u8)> = Vec::new();
        let mut waiting: Vec<(u8, u8)> = Vec::new();
        let mut now = 0;
        // A cache beside the table, as a shard has it.
        let generation = table.generation();
        let mut cached: (u64, Cache) = (0, Cache::new());
        for event in events {
            match event {
                Event::Use { session: s, plan } => {
                    if let Some(found) = table.find(&session(s), &hash(plan), at(now)) {
                        let value = found.plan;
                        cached.1.insert((s, plan), Rc::downgrade(&value));
                        prop_assert_eq!(value.0, plan);
                        prop_assert!(value.1.is_none_or(|own| own == s), "another session's plan");
                        prop_assert!(value.1.is_some() == (isolated(s) || has_state(plan)));
                    } else if compiling.contains(&(s, plan)) || waiting.contains(&(s, plan)) {
                        // Its registration is in flight.
                    } else {
                        match table.claim(&session(s), &hash(plan), isolated(s), (s, plan), at(now)) {
                            Claim::Known(_) => prop_assert!(table.find(&session(s), &hash(plan), at(now)).is_some()),
                            Claim::Compile(_) => {
                                let same = |(other, p): &&(u8, u8)| *p == plan && !isolated(*other);
                                prop_assert!(
                                    isolated(s) || has_state(plan) || compiling.iter().filter(same).count() == 0,
                                    "a plan for everybody is compiled once"
                                );
                                compiling.push((s, plan));
                            }
                            Claim::Waits => waiting.push((s, plan)),
                        }
                    }
                }
                Event::Compiled(which, good) if !compiling.is_empty() => {
                    let (s, plan) = compiling.swap_remove(which % compiling.len());
                    let made = good.then(|| Made {
                        value: Rc::new((plan, (isolated(s) || has_state(plan)).then_some(s))),
                        bytes: u64::from(plan) * 5 + 1,
                        peer: format!("peer {}", s % 3),
                        has_state: has_state(plan),
                        isolated: isolated(s),
                    });
                    let result = table.compiled(&session(s), &hash(plan), made, at(now));
                    if let Some(refused) = &result.refused {
                        let for_room = matches!(refused, Refused::Plans { .. } | Refused::Left { .. });
                        prop_assert!(good && for_room);
                    } else if good {
                        prop_assert!(table.find(&session(s), &hash(plan), at(now)).is_some());
                    }
                    for waiter in result.waiters {
                        prop_assert_eq!(waiter.1, plan);
                        waiting.retain(|other| *other != waiter);
                    }
                }
                Event::Compiled(..) => {}
                Event::Closed(s) => {
                    for value in table.session_closed(&session(s)) {
                        prop_assert_eq!(value.1, Some(s), "everybody's plans stay");
                    }
                    prop_assert!((0..8).all(|plan| table.find(&session(s), &hash(plan), at(now)).is_none()));
                }
                Event::Later(seconds) => {
                    now += seconds;
                    for value in table.expire(at(now)) {
                        prop_assert!(!has_state(value.0), "a session that rests keeps its state");
                        prop_assert_eq!(Rc::strong_count(&value), 1, "given back once");
                    }
                    let resting = table.resting(at(now));
                    prop_assert!(table.resting(at(now)).is_empty(), "each is returned once");
                    // Those with an even number turn out to have ended.
                    for s in (0..7).step_by(2).filter(|s| resting.contains(&session(*s).into())) {
                        table.session_closed(&session(s));
                        prop_assert!((0..8).all(|plan| table.find(&session(s), &hash(plan), at(now)).is_none()));
                    }
                }
                Event::Clear => {
                    table.clear();
                    prop_assert!(table.is_empty());
                }
            }
            table.check();
            if std::mem::replace(&mut cached.0, generation.load(Relaxed)) != cached.0 {
                cached.1.clear();
            }
            for ((s, plan), value) in &cached.1 {
                let id = table.sessions.get(&session(*s)[..]).and_then(|session| session.plans.get(&hash(*plan)));
                let found = id.and_then(|id| table.plans.get(id)).map(|plan| Rc::as_ptr(&plan.value));
                prop_assert_eq!(found, Some(value.as_ptr()), "a session may use what is cached for it");
            }
        }
        // Every waiter is notified in the end.
        while let Some((s, plan)) = compiling.pop() {
            for waiter in table.compiled(&session(s), &hash(plan), None, at(now)).waiters {
                waiting.retain(|other| *other != waiter);
            }
        }
        prop_assert!(waiting.is_empty(), "{waiting:?}");
        for s in 0..7 {
            table.session_closed(&session(s));
        }
        table.check();
        prop_assert!(table.plans.values().all(|plan| plan.session.is_none() && plan.users == 0));
        table.expire(at(now + 61));
        prop_assert!(table.is_empty());
    }
}

fn made(value: &'static str, peer: &str, bytes: u64, has_state: bool) -> Option<Made<&'static str>> {
    Some(Made { value, bytes, peer: peer.into(), has_state, isolated: false })
}

fn register(table: &mut Plans<&'static str, u8>, s: u8, plan: u8, bytes: u64, has_state: bool) -> Option<Refused> {
    assert_eq!(table.claim(&session(s), &hash(plan), false, 0, at(0)), Claim::Compile(0));
    table.compiled(&session(s), &hash(plan), made("plan", "peer", bytes, has_state), at(0)).refused
}

#[test]
fn a_thousand_sessions_with_the_same_model_cost_one_plan() {
    let mut table = Plans::new(LIMITS);
    assert_eq!(register(&mut table, 0, 2, 10, false), None);
    for n in 0..1000u32 {
        let name = n.to_le_bytes();
        assert!(table.find(&name, &hash(2), at(1)).is_none());
        assert_eq!(table.adopt(&name, &hash(2), false, at(1)).map(|found| found.plan), Some("plan"));
        assert_eq!(table.find(&name, &hash(2), at(1)).map(|found| found.plan), Some("plan"));
    }
    assert_eq!(table.len(), 1);
    table.check();
}

#[test]
fn a_plan_with_state_is_not_evicted_and_goes_with_its_session() {
    let _reached = starwire_marks::expect("a plan that sessions use is evicted");
    let mut table = Plans::new(LIMITS);
    assert_eq!(register(&mut table, 0, 1, 10, true), None);
    for plan in [2, 4, 6, 8, 10, 12] {
        assert_eq!(register(&mut table, 0, plan, 10, false), None);
    }
    assert_eq!(table.len(), 4);
    assert_eq!(table.evicted(), 3);
    assert!(table.find(&session(0), &hash(1), at(0)).is_some());
    assert!(table.find(&session(0), &hash(2), at(0)).is_none(), "the least recently used one went");
    assert!(table.find(&session(1), &hash(1), at(0)).is_none());
    assert_eq!(table.expire(at(599)).len(), 3);
    assert_eq!(table.resting(at(599)), []);
    // However long the session rests, its owner closes it.
    assert_eq!(table.expire(at(100_000)).len(), 0);
    assert_eq!(table.resting(at(100_000)), [session(0).into()]);
    assert_eq!(table.resting(at(100_600)), []);
    assert!(table.find(&session(0), &hash(1), at(100_600)).is_some());
    assert_eq!(table.resting(at(101_200)), []);
    assert_eq!(table.session_closed(&session(0)).len(), 1);
    table.check();
}

#[test]
fn sessions_do_not_wait_for_each_others_state() {
    let mut table: Plans<&str, u8> = Plans::new(LIMITS);
    assert_eq!(table.claim(&session(0), &hash(1), false, 0, at(0)), Claim::Compile(0));
    assert_eq!(table.claim(&session(1), &hash(1), false, 1, at(0)), Claim::Waits);
    assert_eq!(table.compiled(&session(0), &hash(1), made("own", "peer", 1, true), at(0)).waiters, [1]);
    assert_eq!(table.claim(&session(1), &hash(1), false, 1, at(0)), Claim::Compile(1));
    assert_eq!(table.claim(&session(2), &hash(1), false, 2, at(0)), Claim::Compile(2));
}

#[test]
fn where_all_have_no_more_room_who_has_most_makes_way() {
    let _reached = starwire_marks::expect("the budget of all peers is used up");
    let mut table = Plans::new(LIMITS);
    let mut register = |peer: &str, plan: u8, bytes: u64, has_state: bool| {
        assert_eq!(table.claim(&session(0), &hash(plan), false, 0, at(0)), Claim::Compile(0));
        table.compiled(&session(0), &hash(plan), made("plan", peer, bytes, has_state), at(0)).refused
    };
    assert_eq!(register("greedy", 2, 45, false), None);
    assert_eq!(register("greedy", 4, 45, false), None);
    assert_eq!(register("modest", 6, 30, false), None);
    // 120 of 150: a third one finds room although nobody left any for it.
    assert_eq!(register("late", 8, 40, false), None);
    assert!(table.find(&session(0), &hash(2), at(0)).is_none());
    assert!([4, 6, 8].iter().all(|plan| table.find(&session(0), &hash(*plan), at(0)).is_some()));
    // Names that were never used again are not kept.
    for n in 0..100 {
        let peer = format!("peer {n}");
        assert_eq!(table.claim(&session(1), &hash(10), false, 0, at(0)), Claim::Compile(0));
        table.compiled(&session(1), &hash(10), made("plan", &peer, 1, true), at(0));
        table.session_closed(&session(1));
    }
    table.check();
    assert_eq!(table.owners.len(), 3);
    // A plan with state cannot be registered again, so it is not evicted.
    let mut table = Plans::new(LIMITS);
    for (peer, plan) in [("a", 1), ("b", 3)] {
        assert_eq!(table.claim(&session(0), &hash(plan), false, 0, at(0)), Claim::Compile(0));
        table.compiled(&session(0), &hash(plan), made("plan", peer, 70, true), at(0));
    }
    assert_eq!(table.claim(&session(0), &hash(5), false, 0, at(0)), Claim::Compile(0));
    let refused = table.compiled(&session(0), &hash(5), made("plan", "c", 20, false), at(0)).refused;
    assert_eq!(
        refused.map(|r| r.to_string()).as_deref(),
        Some(
            "starwire: c would hold 20 bytes on this server, where 10 of 150 are free: a worker may hold no more than is free (STARWIRE_STAR_MAX_TOTAL_BYTES)"
        )
    );
    table.check();
}

#[test]
fn a_plan_that_can_never_fit_drives_nobody_out() {
    let mut table = Plans::new(LIMITS);
    assert_eq!(register(&mut table, 0, 2, 10, false), None);
    let refused = register(&mut table, 0, 4, 101, false);
    assert_eq!(
        refused.map(|r| r.to_string()).as_deref(),
        Some(
            "starwire: peer has 2 plans of 111 bytes on this server, at most 4 of 100 bytes are allowed (STARWIRE_STAR_LIMITS=plans=…,plan_bytes=…)"
        )
    );
    assert_eq!(table.len(), 1);
}
