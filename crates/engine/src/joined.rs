//! Tasks that have joined: connected peers that are not in the ClusterSpec, and where this task reaches them. No I/O.
//!
//! A task has joined as long as it has a connection. Nobody can join in the name of a task that has; whether a name may
//! join at all, and that it belongs to the peer, is checked before.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use starwire_protocol::Claim;

#[derive(Default)]
pub struct Joined {
    tasks: HashMap<String, Task>,
    /// The task of each connection.
    connections: HashMap<u64, String>,
    /// How often a task has joined.
    joins: u64,
}

struct Task {
    address: String,
    incarnation: u64,
    connections: usize,
    /// Tells it from tasks that had its name before.
    join: u64,
    channel: Option<ChannelAt>,
}

/// A channel of a shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChannelAt {
    pub shard: usize,
    pub number: u32,
}

/// A task that has left.
#[derive(Debug, PartialEq, Eq)]
pub struct Left {
    pub task: String,
    pub address: String,
    /// Over which it was reached.
    pub channel: Option<ChannelAt>,
}

impl Joined {
    /// A peer has connected. Returns whether its task joins with this connection; the error says why it may not.
    pub fn arrives(&mut self, connection: u64, claim: &Claim<'_>) -> Result<bool, String> {
        let is_new = match self.tasks.entry(claim.task.to_owned()) {
            Entry::Vacant(place) => {
                let (address, incarnation) = (claim.address.to_owned(), claim.incarnation);
                self.joins += 1;
                place.insert(Task { address, incarnation, connections: 1, join: self.joins, channel: None });
                true
            }
            Entry::Occupied(mut found) => {
                let task = found.get_mut();
                if (task.incarnation, task.address.as_str()) != (claim.incarnation, claim.address) {
                    let Claim { task: name, address, .. } = claim;
                    return Err(format!(
                        "{name} at {address} cannot join: {name} at {} has joined and is still connected",
                        task.address
                    ));
                }
                task.connections += 1;
                false
            }
        };
        self.connections.insert(connection, claim.task.to_owned());
        Ok(is_new)
    }

    /// A connection has ended. Returns its task if that was the last one.
    pub fn leaves(&mut self, connection: u64) -> Option<Left> {
        let name = self.connections.remove(&connection)?;
        let Entry::Occupied(mut found) = self.tasks.entry(name) else { return None };
        found.get_mut().connections -= 1;
        let left = (found.get().connections == 0).then(|| found.remove_entry());
        left.map(|(task, Task { address, channel, .. })| Left { task, address, channel })
    }

    /// Where the task is reached, and a number that tells it from tasks that had its name before.
    pub fn address(&self, task: &str) -> Option<(&str, u64)> {
        self.tasks.get(task).map(|task| (task.address.as_str(), task.join))
    }

    /// The task is reached over this channel, which is disconnected when it leaves. False: it has left.
    pub fn reached(&mut self, task: &str, join: u64, channel: ChannelAt) -> bool {
        let Some(task) = self.tasks.get_mut(task).filter(|task| task.join == join) else { return false };
        task.channel = Some(channel);
        true
    }

    pub fn incarnation(&self, task: &str) -> Option<u64> {
        self.tasks.get(task).map(|task| task.incarnation)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::random::Random;

    fn claim<'a>(task: &'a str, incarnation: u64, address: &'a str) -> Claim<'a> {
        Claim { task, incarnation, address }
    }

    #[test]
    fn a_task_has_joined_while_it_has_a_connection() {
        let mut joined = Joined::default();
        assert_eq!(joined.arrives(1, &claim("w", 7, "a:1")), Ok(true));
        assert_eq!(joined.arrives(2, &claim("w", 7, "a:1")), Ok(false));
        assert_eq!((joined.leaves(1), joined.leaves(1)), (None, None));
        let (first, second) = (ChannelAt { shard: 1, number: 2 }, ChannelAt { shard: 0, number: 3 });
        assert_eq!((joined.address("w"), joined.incarnation("w")), (Some(("a:1", 1)), Some(7)));
        assert!(joined.reached("w", 1, first));
        assert_eq!(joined.leaves(2), Some(Left { task: "w".into(), address: "a:1".into(), channel: Some(first) }));
        assert_eq!((joined.address("w"), joined.incarnation("w")), (None, None));
        assert!(!joined.reached("w", 1, second));
        assert_eq!(joined.arrives(3, &claim("w", 8, "a:1")), Ok(true));
        assert!(!joined.reached("w", 1, second), "that was its predecessor");
        assert_eq!(joined.leaves(3), Some(Left { task: "w".into(), address: "a:1".into(), channel: None }));
    }

    #[test]
    fn nobody_replaces_a_task_that_is_connected() {
        let mut joined = Joined::default();
        assert_eq!(joined.arrives(1, &claim("w", 7, "a:1")), Ok(true));
        for other in [claim("w", 8, "a:1"), claim("w", 8, "b:1"), claim("w", 7, "b:1")] {
            let why = joined.arrives(2, &other).unwrap_err();
            assert!(why.contains("w at a:1 has joined and is still connected"), "{why}");
        }
        assert_eq!(joined.leaves(2), None);
        assert_eq!(joined.address("w"), Some(("a:1", 1)));
    }

    /// Against a model that keeps nothing but the open connections.
    #[test]
    fn random_arrivals_and_ends() {
        let mut random = Random(0x9E37_79B9_7F4A_7C15);
        let mut below = |n| random.below(n);
        let (mut joined, mut open) = (Joined::default(), BTreeMap::<u64, (String, u64, &str)>::new());
        let (mut accepted, mut refused, mut left) = (0, 0, 0);
        for connection in 0..20_000 {
            let task = format!("w{}", below(5));
            if below(2) == 0 {
                let (incarnation, address) = (below(3), ["a:1", "b:1"][usize::try_from(below(2)).unwrap()]);
                let others: Vec<_> = open.values().filter(|(name, ..)| *name == task).collect();
                let fits = others.iter().all(|(_, i, a)| (*i, *a) == (incarnation, address));
                let result = joined.arrives(connection, &claim(&task, incarnation, address));
                assert_eq!(result.as_ref().ok(), fits.then_some(&others.is_empty()));
                if fits {
                    open.insert(connection, (task.clone(), incarnation, address));
                }
                *(if fits { &mut accepted } else { &mut refused }) += 1;
            } else {
                let nth = usize::try_from(below(open.len() as u64 + 1)).unwrap();
                // Also one that never joined.
                let ended = open.keys().nth(nth).copied().unwrap_or(connection);
                let was = open.remove(&ended);
                let last = was.filter(|(name, ..)| open.values().all(|(other, ..)| other != name));
                left += u64::from(last.is_some());
                let found = joined.leaves(ended).map(|Left { task, address, .. }| (task, address));
                assert_eq!(found, last.map(|(name, _, address)| (name, address.to_owned())));
            }
            let expected = open.values().find(|(name, ..)| *name == task).map(|(.., address)| *address);
            assert_eq!(joined.address(&task).map(|(address, _)| address), expected);
            assert_eq!(joined.connections.len(), open.len());
        }
        assert!(accepted > 1000 && refused > 1000 && left > 1000, "{accepted} {refused} {left}");
    }
}
