//! Sets of facts, each distinct set stored once: comparing two sets compares two numbers.

use std::collections::HashMap;

use super::graph::number;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SetId(u32);

impl SetId {
    pub const EMPTY: SetId = SetId(0);
}

/// A larger set becomes a single fact: "all of these". This keeps every set cheap; equal sets may then compare as
/// different, which is safe because planners only group what is equal.
const LARGEST: usize = 64;

/// `F` is a small, ordered fact.
pub struct Sets<F> {
    known: Vec<Box<[F]>>,
    ids: HashMap<Box<[F]>, SetId>,
    unions: HashMap<(SetId, SetId), SetId>,
    /// Makes a single fact of a set that is too large.
    bundle: fn(SetId) -> F,
}

impl<F: Copy + Ord + std::hash::Hash> Sets<F> {
    pub fn new(bundle: fn(SetId) -> F) -> Self {
        let empty: Box<[F]> = Box::new([]);
        Self { known: vec![empty.clone()], ids: HashMap::from([(empty, SetId::EMPTY)]), unions: HashMap::new(), bundle }
    }

    pub fn of(&self, set: SetId) -> &[F] {
        &self.known[super::graph::index(set.0)]
    }

    pub fn intern(&mut self, mut facts: Vec<F>) -> SetId {
        facts.sort_unstable();
        facts.dedup();
        if facts.len() > LARGEST {
            let all = self.keep(facts);
            facts = vec![(self.bundle)(all)];
        }
        self.keep(facts)
    }

    pub fn with(&mut self, set: SetId, fact: F) -> SetId {
        if self.of(set).binary_search(&fact).is_ok() {
            return set;
        }
        let mut facts = self.of(set).to_vec();
        facts.push(fact);
        self.intern(facts)
    }

    pub fn union(&mut self, a: SetId, b: SetId) -> SetId {
        if a == b || b == SetId::EMPTY {
            return a;
        }
        if a == SetId::EMPTY {
            return b;
        }
        let pair = (a.min(b), a.max(b));
        if let Some(known) = self.unions.get(&pair) {
            return *known;
        }
        let facts = [self.of(a), self.of(b)].concat();
        let union = self.intern(facts);
        self.unions.insert(pair, union);
        union
    }

    pub fn both(&mut self, a: SetId, b: SetId) -> SetId {
        if a == b { a } else { self.intersection(&[a, b]) }
    }

    pub fn intersection(&mut self, sets: &[SetId]) -> SetId {
        let Some((first, rest)) = sets.split_first() else { return SetId::EMPTY };
        let mut common = self.of(*first).to_vec();
        for other in rest {
            let facts = self.of(*other);
            common.retain(|fact| facts.binary_search(fact).is_ok());
        }
        self.keep(common)
    }

    fn keep(&mut self, facts: Vec<F>) -> SetId {
        if let Some(id) = self.ids.get(facts.as_slice()) {
            return *id;
        }
        // There are at most a few sets per node, and nodes fit into 31 bits.
        let id = SetId(number(self.known.len()));
        let facts = facts.into_boxed_slice();
        self.known.push(facts.clone());
        self.ids.insert(facts, id);
        id
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sets() -> Sets<u64> {
        Sets::new(|set| 1_000_000 + u64::from(set.0))
    }

    #[test]
    fn equal_sets_are_the_same() {
        let mut sets = sets();
        let (a, b) = (sets.intern(vec![3, 1, 3]), sets.intern(vec![1, 3]));
        assert_eq!(a, b);
        let two = sets.intern(vec![2]);
        let union = sets.union(a, two);
        assert_eq!(sets.of(union), [1, 2, 3]);
        assert_eq!(sets.union(two, b), union);
        assert_eq!(sets.intersection(&[union, a]), a);
        assert_eq!(sets.intersection(&[two, a]), SetId::EMPTY);
        assert_eq!(sets.with(a, 2), union);
    }

    #[test]
    fn sets_do_not_grow_without_bound() {
        let mut sets = sets();
        let mut grown = SetId::EMPTY;
        let mut different = std::collections::HashSet::new();
        for fact in 0..10_000 {
            grown = sets.with(grown, fact);
            assert!(sets.of(grown).len() <= LARGEST);
            assert!(different.insert(grown), "two different sets became the same");
        }
    }
}
