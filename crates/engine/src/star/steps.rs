//! Values that stay on a server between the calls of a step, by connection: a step belongs to the connection of its
//! calls, and ends with it. A step may rest between two calls for any time: the worker announces its end. The limits,
//! per peer, bound what a worker leaves behind that never announces it.

use std::collections::HashMap;
use std::sync::Arc;

use super::Refused;
use super::accounts::Account;
use crate::api::Slots;
use crate::config::StepLimits;

struct Peer<V> {
    account: Arc<Account>,
    calls: u64,
    values: u64,
    bytes: u64,
    steps: HashMap<i64, Step<V>>,
}

struct Step<V> {
    slots: HashMap<u32, (V, u64)>,
    /// Calls of this step in flight, which may still keep values.
    calls: u64,
    /// It is over: values that its calls still keep are dropped at once.
    ended: bool,
}

impl<V> Step<V> {
    fn new() -> Self {
        Self { slots: HashMap::new(), calls: 0, ended: false }
    }
}

/// `V`: a value.
pub struct Steps<V> {
    limits: StepLimits,
    peers: HashMap<u64, Peer<V>>,
    values: u64,
}

impl<V> Steps<V> {
    pub fn new(limits: StepLimits) -> Self {
        Self { limits, peers: HashMap::new(), values: 0 }
    }

    pub fn peer_came(&mut self, connection: u64, account: Arc<Account>) {
        let peer = Peer { account, calls: 0, values: 0, bytes: 0, steps: HashMap::new() };
        self.peers.insert(connection, peer);
    }

    /// Drops everything of this connection.
    pub fn peer_gone(&mut self, connection: u64) -> Vec<V> {
        let Some(peer) = self.peers.remove(&connection) else { return Vec::new() };
        self.values -= peer.values;
        peer.account.give(peer.values, peer.bytes);
        peer.account.give_calls(peer.calls);
        peer.steps.into_values().flat_map(|step| step.slots.into_values()).map(|(value, _)| value).collect()
    }

    pub fn account(&self, connection: u64) -> Option<&Arc<Account>> {
        self.peers.get(&connection).map(|peer| &peer.account)
    }

    /// A call arrived. `keeps`: it keeps values. Returns whether its step is on record: it is if some call of it keeps
    /// values, or has.
    pub fn call_began(&mut self, connection: u64, step: i64, keeps: bool) -> Result<bool, Refused> {
        let peer = self.peers.get_mut(&connection).ok_or(Refused::Gone)?;
        peer.account.take_call(&self.limits)?;
        peer.calls += 1;
        let step = match keeps {
            true => Some(peer.steps.entry(step).or_insert_with(Step::new)),
            false => peer.steps.get_mut(&step),
        };
        let Some(step) = step else { return Ok(false) };
        step.calls += 1;
        Ok(true)
    }

    /// Ends a call that [`Steps::call_began`] allowed, with its result. `last`: the step needs nothing more of this
    /// server.
    pub fn call_ended(&mut self, connection: u64, step: i64, on_record: bool, last: bool) -> Vec<V> {
        let Some(peer) = self.peers.get_mut(&connection) else { return Vec::new() };
        if let Some(calls) = peer.calls.checked_sub(1) {
            peer.calls = calls;
            peer.account.give_calls(1);
        }
        if on_record {
            if let Some(step) = peer.steps.get_mut(&step) {
                step.calls = step.calls.saturating_sub(1);
            }
        }
        if last {
            return self.step_ended(connection, step);
        }
        self.forget_if_over(connection, step);
        Vec::new()
    }

    /// Keeps a value. Returns the one that was in the slot, or the value itself if the step is over.
    pub fn keep(
        &mut self,
        connection: u64,
        step: i64,
        slot: u32,
        value: V,
        bytes: u64,
    ) -> Result<Option<V>, (V, Refused)> {
        let Some(peer) = self.peers.get_mut(&connection) else { return Err((value, Refused::Gone)) };
        let Some(step) = peer.steps.get_mut(&step).filter(|step| !step.ended) else { return Ok(Some(value)) };
        let old = step.slots.get(&slot).map(|(_, bytes)| *bytes);
        let (news, back) = (u64::from(old.is_none()), old.unwrap_or(0));
        if let Err(refused) = peer.account.take(news, bytes, back, &self.limits) {
            return Err((value, refused));
        }
        peer.account.give(0, back);
        self.values += news;
        peer.values += news;
        peer.bytes = peer.bytes - back + bytes;
        Ok(step.slots.insert(slot, (value, bytes)).map(|(value, _)| value))
    }

    /// Returns the values that earlier calls of the step kept.
    pub fn slots(&self, connection: u64, step: i64) -> Slots<'_, V> {
        let step = self.peers.get(&connection).and_then(|peer| peer.steps.get(&step));
        Slots::new(step.map(|step| &step.slots))
    }

    /// The step needs nothing more of this server.
    pub fn step_ended(&mut self, connection: u64, step: i64) -> Vec<V> {
        let Some(peer) = self.peers.get_mut(&connection) else { return Vec::new() };
        let Some(over) = peer.steps.get_mut(&step) else { return Vec::new() };
        over.ended = true;
        let slots = std::mem::take(&mut over.slots);
        let (values, bytes) = (slots.len() as u64, slots.values().map(|(_, bytes)| *bytes).sum::<u64>());
        peer.account.give(values, bytes);
        peer.values -= values;
        peer.bytes -= bytes;
        self.values -= values;
        self.forget_if_over(connection, step);
        slots.into_values().map(|(value, _)| value).collect()
    }

    /// A step without calls and values needs no record.
    fn forget_if_over(&mut self, connection: u64, step: i64) {
        let Some(peer) = self.peers.get_mut(&connection) else { return };
        if peer.steps.get(&step).is_some_and(|step| step.calls == 0 && step.slots.is_empty()) {
            peer.steps.remove(&step);
        }
    }

    /// Values that are kept.
    pub fn len(&self) -> u64 {
        self.values
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.values == 0
    }
}

#[cfg(test)]
#[path = "steps_tests.rs"]
mod tests;
