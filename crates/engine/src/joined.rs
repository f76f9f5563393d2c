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
}

struct Task {
    address: String,
    incarnation: u64,
    connections: usize,
}

impl Joined {
    /// A peer has connected. Returns whether its task joins with this connection; the error says why it may not.
    pub fn arrives(&mut self, connection: u64, claim: &Claim<'_>) -> Result<bool, String> {
        let is_new = match self.tasks.entry(claim.task.to_owned()) {
            Entry::Vacant(place) => {
                let (address, incarnation) = (claim.address.to_owned(), claim.incarnation);
                place.insert(Task { address, incarnation, connections: 1 });
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

    /// A connection has ended. Returns name and address of its task if that was the last one.
    pub fn leaves(&mut self, connection: u64) -> Option<(String, String)> {
        let name = self.connections.remove(&connection)?;
        let Entry::Occupied(mut found) = self.tasks.entry(name) else { return None };
        found.get_mut().connections -= 1;
        (found.get().connections == 0).then(|| found.remove_entry()).map(|(name, task)| (name, task.address))
    }

    pub fn address(&self, task: &str) -> Option<&str> {
        self.tasks.get(task).map(|task| task.address.as_str())
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
        assert_eq!(joined.address("w"), Some("a:1"));
        assert_eq!(joined.leaves(2), Some(("w".to_owned(), "a:1".to_owned())));
        assert_eq!(joined.address("w"), None);
        assert_eq!(joined.arrives(3, &claim("w", 8, "b:1")), Ok(true));
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
        assert_eq!(joined.address("w"), Some("a:1"));
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
                assert_eq!(joined.leaves(ended), last.map(|(name, _, address)| (name, address.to_owned())));
            }
            let expected = open.values().find(|(name, ..)| *name == task).map(|(.., address)| *address);
            assert_eq!(joined.address(&task), expected);
            assert_eq!(joined.connections.len(), open.len());
        }
        assert!(accepted > 1000 && refused > 1000 && left > 1000, "{accepted} {refused} {left}");
    }
}
