//! The table of plans. A plan is named by its content. It is compiled once for all sessions; if its kernels have state
//! that belongs to a session, or the session has its own devices, once for each of these sessions.
//!
//! A plan is dropped when it was not used for a while, or earlier if its owner needs room for another; a session that
//! still needs it registers it again. A plan with a session's state is dropped only with its session, however long that
//! rests: the table's owner says when it has ended.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use starwire_protocol::star::PlanHash as Hash;

use super::Refused;
use crate::config::PlanLimits;
use starwire_marks::mark;

/// Since any fixed moment; the same for all calls.
type Time = Duration;

/// The next step of a registration.
#[derive(Debug, PartialEq, Eq)]
pub enum Claim<W> {
    /// The plan exists.
    Known(W),
    /// Compile it, then [`Plans::compiled`].
    Compile(W),
    /// It is being compiled; the waiter is returned when that is over.
    Waits,
}

/// Entries that left the table. The caller drops them outside of its lock.
pub type Removed<P> = Vec<P>;

/// A plan as one session uses it. May be kept beside the table until [`Plans::generation`] changes; its uses are noted
/// here, because the table does not see them.
#[derive(Clone, Debug)]
pub struct Found<P> {
    pub plan: P,
    plan_used: Arc<AtomicU64>,
    session_used: Arc<AtomicU64>,
}

impl<P> Found<P> {
    pub fn note_use(&self, now: Time) {
        self.plan_used.store(millis(now), Relaxed);
        self.session_used.store(millis(now), Relaxed);
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Id(u64);

/// A plan to compile, for all sessions or for one.
type Job = (Hash, Option<Box<[u8]>>);

struct Plan<P> {
    value: P,
    hash: Hash,
    /// `None`: shared. Otherwise the session that it belongs to.
    session: Option<Box<[u8]>>,
    has_state: bool,
    bytes: u64,
    owner: u32,
    /// Sessions that use it.
    users: u32,
    used: Arc<AtomicU64>,
}

#[derive(Default)]
struct Session {
    plans: HashMap<Hash, Id>,
    used: Arc<AtomicU64>,
}

#[derive(Default)]
struct Owner {
    name: String,
    plans: u64,
    bytes: u64,
}

/// `P`: a plan, cheap to clone. `W`: a waiter for a plan that is being compiled.
pub struct Plans<P, W> {
    limits: PlanLimits,
    next: u64,
    plans: HashMap<Id, Plan<P>>,
    shared: HashMap<Hash, Id>,
    sessions: HashMap<Box<[u8]>, Session>,
    /// Sessions with plans.
    owners: HashMap<u32, Owner>,
    owner_of: HashMap<String, u32>,
    next_owner: u32,
    /// Bytes of all plans.
    bytes: u64,
    /// Compilations, for all sessions or for one, with their waiters.
    compiling: HashMap<Job, Vec<W>>,
    /// Plans that turned out to have state: sessions do not wait for each other's.
    stateful: HashSet<Hash>,
    evicted: u64,
    generation: Arc<AtomicU64>,
}

/// Most hashes of plans with state that are remembered; beyond, sessions wait for each other once more.
const MAX_REMEMBERED: usize = 4096;

impl<P: Clone, W> Plans<P, W> {
    pub fn new(limits: PlanLimits) -> Self {
        Self {
            limits,
            next: 0,
            plans: HashMap::new(),
            shared: HashMap::new(),
            sessions: HashMap::new(),
            owners: HashMap::new(),
            owner_of: HashMap::new(),
            next_owner: 0,
            bytes: 0,
            compiling: HashMap::new(),
            stateful: HashSet::new(),
            evicted: 0,
            generation: Arc::default(),
        }
    }

    /// Changes whenever a session may no longer use a plan that it could use before.
    pub fn generation(&self) -> Arc<AtomicU64> {
        self.generation.clone()
    }

    /// The plan with this name for a session that has used or registered it.
    pub fn find(&self, session: &[u8], hash: &Hash, now: Time) -> Option<Found<P>> {
        let session = self.sessions.get(session)?;
        let plan = self.plans.get(session.plans.get(hash)?)?;
        let (plan_used, session_used) = (plan.used.clone(), session.used.clone());
        let found = Found { plan: plan.value.clone(), plan_used, session_used };
        found.note_use(now);
        Some(found)
    }

    /// For a session that has not used the plan yet: looks for a shared one. `isolated`: the session has its own
    /// devices.
    pub fn adopt(&mut self, session: &[u8], hash: &Hash, isolated: bool, now: Time) -> Option<Found<P>> {
        if isolated {
            return None;
        }
        let id = *self.shared.get(hash)?;
        self.bind(session, *hash, id, now);
        self.find(session, hash, now)
    }

    /// A session registers a plan.
    pub fn claim(&mut self, session: &[u8], hash: &Hash, isolated: bool, waiter: W, now: Time) -> Claim<W> {
        if self.find(session, hash, now).is_some() || self.adopt(session, hash, isolated, now).is_some() {
            return Claim::Known(waiter);
        }
        let alone = isolated || self.stateful.contains(hash);
        match self.compiling.entry((*hash, alone.then(|| session.into()))) {
            std::collections::hash_map::Entry::Occupied(mut others) => {
                others.get_mut().push(waiter);
                Claim::Waits
            }
            std::collections::hash_map::Entry::Vacant(place) => {
                place.insert(Vec::new());
                Claim::Compile(waiter)
            }
        }
    }

    /// Ends a [`Claim::Compile`], with the plan unless it failed. Returns the waiters: with a plan, each of them claims
    /// again (some may need their own compilation); without, they all fail.
    pub fn compiled(&mut self, session: &[u8], hash: &Hash, made: Option<Made<P>>, now: Time) -> Compiled<P, W> {
        let alone = self.compiling.remove(&(*hash, Some(session.into())));
        // A session's own compilation does not end the shared one.
        let waiters = match alone {
            Some(waiters) => waiters,
            None => self.compiling.remove(&(*hash, None)).unwrap_or_default(),
        };
        let mut removed = Vec::new();
        let mut refused = None;
        if let Some(made) = made {
            match self.insert(session, hash, made, now, &mut removed) {
                Ok(()) => {}
                Err((plan, reason)) => {
                    removed.push(plan);
                    refused = Some(reason);
                }
            }
        }
        Compiled { waiters, removed, refused }
    }

    fn insert(
        &mut self,
        session: &[u8],
        hash: &Hash,
        made: Made<P>,
        now: Time,
        removed: &mut Removed<P>,
    ) -> Result<(), (P, Refused)> {
        if let Err(reason) = self.make_room(&made.peer, made.bytes, removed) {
            let owner = self.owner(&made.peer);
            self.forget_owner(owner);
            return Err((made.value, reason));
        }
        let owner = self.owner(&made.peer);
        if made.has_state {
            if self.stateful.len() >= MAX_REMEMBERED {
                self.stateful.clear();
            }
            self.stateful.insert(*hash);
        }
        let alone = made.has_state || made.isolated;
        let id = Id(self.next);
        self.next += 1;
        let plan = Plan {
            value: made.value,
            hash: *hash,
            session: alone.then(|| session.into()),
            has_state: made.has_state,
            bytes: made.bytes,
            owner,
            users: 0,
            used: Arc::new(AtomicU64::new(millis(now))),
        };
        if let Some(owner) = self.owners.get_mut(&owner) {
            owner.plans += 1;
            owner.bytes += made.bytes;
            self.bytes += made.bytes;
        }
        self.plans.insert(id, plan);
        if !alone {
            if let Some(old) = self.shared.insert(*hash, id) {
                self.remove(old, removed);
            }
        }
        let old = self.sessions.get(session).and_then(|s| s.plans.get(hash)).copied();
        if let Some(old) = old {
            self.remove(old, removed);
        }
        self.bind(session, *hash, id, now);
        Ok(())
    }

    /// Makes room for one more plan of this owner: drops the least recently used plans that can be registered again, of
    /// the owner itself or of the peer with the most.
    fn make_room(&mut self, peer: &str, bytes: u64, removed: &mut Removed<P>) -> Result<(), Refused> {
        loop {
            let owner = self.owner(peer);
            let Some(has) = self.owners.get(&owner) else { return Ok(()) };
            let (plans, own, all) = (has.plans + 1, has.bytes.saturating_add(bytes), self.bytes.saturating_add(bytes));
            let too_many = plans > self.limits.plans || own > self.limits.bytes;
            if !too_many && all <= self.limits.all_bytes {
                return Ok(());
            }
            // A plan that does not even fit into an empty table evicts nothing.
            let hopeless = bytes > self.limits.bytes.min(self.limits.all_bytes);
            let victim = if too_many { Some(owner) } else { self.who_has_most(owner, own) };
            let Some(oldest) = victim.filter(|_| !hopeless).and_then(|victim| self.least_used(victim)) else {
                let peer = has.name.clone();
                let (max_plans, max_bytes, max) = (self.limits.plans, self.limits.bytes, self.limits.all_bytes);
                return Err(if too_many {
                    Refused::Plans { peer, plans, bytes: own, max_plans, max_bytes }
                } else {
                    mark!("the budget of all peers is used up");
                    Refused::Left { peer, bytes: own, left: max.saturating_sub(self.bytes), max }
                });
            };
            if self.plans.get(&oldest).is_some_and(|plan| plan.users != 0) {
                mark!("a plan that sessions use is evicted");
            }
            self.evicted += 1;
            self.remove(oldest, removed);
        }
    }

    /// Among owners with something to drop; `owner` would have `own` bytes.
    fn who_has_most(&self, owner: u32, own: u64) -> Option<u32> {
        let bytes =
            |number: &u32| if *number == owner { own } else { self.owners.get(number).map_or(0, |has| has.bytes) };
        let droppable = self.plans.values().filter(|plan| !plan.has_state).map(|plan| plan.owner);
        droppable.filter(|other| bytes(other) >= own).max_by_key(|other| (bytes(other), *other))
    }

    fn least_used(&self, owner: u32) -> Option<Id> {
        let mine = self.plans.iter().filter(|(_, plan)| plan.owner == owner && !plan.has_state);
        mine.min_by_key(|(id, plan)| (plan.users != 0, plan.used.load(Relaxed), id.0)).map(|(id, _)| *id)
    }

    fn bind(&mut self, session: &[u8], hash: Hash, id: Id, now: Time) {
        if !self.sessions.contains_key(session) {
            self.sessions.insert(session.into(), Session::default());
        }
        let Some(session) = self.sessions.get_mut(session) else { return };
        session.used.store(millis(now), Relaxed);
        let before = session.plans.insert(hash, id);
        if let Some(plan) = self.plans.get_mut(&id) {
            plan.used.store(millis(now), Relaxed);
            plan.users += u32::from(before != Some(id));
        }
    }

    fn remove(&mut self, id: Id, removed: &mut Removed<P>) {
        let Some(plan) = self.plans.remove(&id) else { return };
        self.generation.fetch_add(1, Relaxed);
        if let Some(owner) = self.owners.get_mut(&plan.owner) {
            owner.plans -= 1;
            owner.bytes -= plan.bytes;
            self.bytes -= plan.bytes;
        }
        self.forget_owner(plan.owner);
        if self.shared.get(&plan.hash) == Some(&id) {
            self.shared.remove(&plan.hash);
        }
        let mut left = plan.users;
        let mut forget = |session: &mut Session| {
            if session.plans.get(&plan.hash) == Some(&id) {
                session.plans.remove(&plan.hash);
                left -= 1;
            }
        };
        match &plan.session {
            Some(own) => {
                if let Some(session) = self.sessions.get_mut(own) {
                    forget(session);
                }
            }
            None => {
                for session in self.sessions.values_mut() {
                    forget(session);
                }
            }
        }
        debug_assert_eq!(left, 0, "whoever has a plan in its list is counted");
        removed.push(plan.value);
    }

    /// The session has ended: releases the plans that it used and drops its own.
    pub fn session_closed(&mut self, session: &[u8]) -> Removed<P> {
        let mut removed = Vec::new();
        let Some(gone) = self.sessions.remove(session) else { return removed };
        self.generation.fetch_add(1, Relaxed);
        for id in gone.plans.into_values() {
            let Some(plan) = self.plans.get_mut(&id) else { continue };
            plan.users -= 1;
            if plan.session.is_some() {
                self.remove(id, &mut removed);
            }
        }
        removed
    }

    /// Drops everything.
    pub fn clear(&mut self) -> Removed<P> {
        self.generation.fetch_add(1, Relaxed);
        self.shared.clear();
        self.sessions.clear();
        self.owners.clear();
        self.owner_of.clear();
        self.bytes = 0;
        self.plans.drain().map(|(_, plan)| plan.value).collect()
    }

    /// Drops plans that were not used for too long.
    pub fn expire(&mut self, now: Time) -> Removed<P> {
        let mut removed = Vec::new();
        let idle = self.limits.plan_idle;
        let plans = self.plans.iter().filter(|(_, plan)| !plan.has_state && is_old(&plan.used, idle, now));
        let plans: Vec<Id> = plans.map(|(id, _)| *id).collect();
        for id in plans {
            self.evicted += 1;
            self.remove(id, &mut removed);
        }
        removed
    }

    /// Returns the sessions that were not used for `session_idle`, and counts them as used now. The caller checks
    /// whether they still exist.
    pub fn resting(&self, now: Time) -> Vec<Box<[u8]>> {
        let idle = self.limits.session_idle;
        let resting = self.sessions.iter().filter(|(_, session)| is_old(&session.used, idle, now));
        resting.inspect(|(_, session)| session.used.store(millis(now), Relaxed)).map(|(name, _)| name.clone()).collect()
    }

    pub fn len(&self) -> usize {
        self.plans.len()
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }

    /// Plans that were dropped because they were unused or room was needed.
    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    fn owner(&mut self, name: &str) -> u32 {
        if let Some(number) = self.owner_of.get(name) {
            return *number;
        }
        while self.owners.contains_key(&self.next_owner) {
            self.next_owner = self.next_owner.wrapping_add(1);
        }
        let number = self.next_owner;
        self.owners.insert(number, Owner { name: name.into(), ..Owner::default() });
        self.owner_of.insert(name.into(), number);
        number
    }

    /// Forgets owners without plans.
    fn forget_owner(&mut self, owner: u32) {
        if self.owners.get(&owner).is_some_and(|has| has.plans == 0) {
            if let Some(gone) = self.owners.remove(&owner) {
                self.owner_of.remove(&gone.name);
            }
        }
    }

    /// Panics if the table is inconsistent.
    #[cfg(test)]
    fn check(&self) {
        let mut users: HashMap<Id, u32> = HashMap::new();
        for (name, session) in &self.sessions {
            for (hash, id) in &session.plans {
                let plan = &self.plans[id];
                assert_eq!(plan.hash, *hash);
                assert!(plan.session.is_none() || plan.session.as_ref() == Some(name), "another session's plan");
                *users.entry(*id).or_default() += 1;
            }
        }
        for (id, plan) in &self.plans {
            assert_eq!(plan.users, users.get(id).copied().unwrap_or(0));
            assert!(plan.session.is_some() || self.shared.get(&plan.hash) == Some(id));
            assert!(plan.session.is_none() || plan.users == 1, "a session's own plan goes with the session");
        }
        assert_eq!(self.shared.len(), self.plans.values().filter(|plan| plan.session.is_none()).count());
        assert!(self.bytes <= self.limits.all_bytes);
        assert_eq!(self.bytes, self.owners.values().map(|owner| owner.bytes).sum::<u64>());
        assert_eq!(self.owners.len(), self.owner_of.len());
        for (number, owner) in &self.owners {
            assert!(owner.plans > 0, "of whom nothing is left, nothing is remembered");
            let mine = self.plans.values().filter(|plan| plan.owner == *number);
            let (plans, bytes) = mine.fold((0, 0), |(n, bytes), plan| (n + 1, bytes + plan.bytes));
            assert_eq!((owner.plans, owner.bytes), (plans, bytes));
            assert!(owner.plans <= self.limits.plans && owner.bytes <= self.limits.bytes);
        }
    }
}

/// A compiled plan.
#[derive(Debug)]
pub struct Made<P> {
    pub value: P,
    pub bytes: u64,
    /// The owner that registered it.
    pub peer: String,
    /// Its kernels have state that belongs to a session.
    pub has_state: bool,
    /// It is for a session's own devices.
    pub isolated: bool,
}

pub struct Compiled<P, W> {
    pub waiters: Vec<W>,
    pub removed: Removed<P>,
    /// There was no room for it.
    pub refused: Option<Refused>,
}

fn is_old(used: &AtomicU64, idle: Duration, now: Time) -> bool {
    millis(now).saturating_sub(used.load(Relaxed)) > millis(idle)
}

fn millis(time: Time) -> u64 {
    time.as_secs() * 1000 + u64::from(time.subsec_millis())
}

#[cfg(test)]
#[path = "plans_tests.rs"]
mod tests;
