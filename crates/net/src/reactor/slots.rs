//! A slab whose keys carry a generation: the key of a freed slot never finds the slot's next tenant.

use super::driver::Token;

pub struct Slots<T> {
    entries: Vec<Entry<T>>,
    free: Vec<u32>,
}

struct Entry<T> {
    generation: u32,
    value: Option<T>,
}

impl<T> Slots<T> {
    pub fn new() -> Self {
        Slots { entries: Vec::new(), free: Vec::new() }
    }

    pub fn insert(&mut self, value: T) -> Token {
        if let Some(index) = self.free.pop() {
            let entry = &mut self.entries[index as usize];
            entry.value = Some(value);
            return token(index, entry.generation);
        }
        // At most two slots per descriptor, and the descriptor limit is far below 2^32.
        let index = u32::try_from(self.entries.len()).unwrap_or_else(|_| unreachable!("2^32 slots"));
        self.entries.push(Entry { generation: 1, value: Some(value) });
        token(index, 1)
    }

    pub fn get_mut(&mut self, key: Token) -> Option<&mut T> {
        let (index, generation) = split(key);
        self.entries.get_mut(index as usize).filter(|e| e.generation == generation)?.value.as_mut()
    }

    pub fn remove(&mut self, key: Token) -> Option<T> {
        let (index, generation) = split(key);
        let entry = self.entries.get_mut(index as usize).filter(|e| e.generation == generation)?;
        let value = entry.value.take()?;
        entry.generation = entry.generation.wrapping_add(1);
        self.free.push(index);
        Some(value)
    }

    pub fn keys(&self) -> Vec<Token> {
        let used = (0..).zip(&self.entries).filter(|(_, entry)| entry.value.is_some());
        used.map(|(index, entry)| token(index, entry.generation)).collect()
    }

    pub fn contains(&self, key: Token) -> bool {
        let (index, generation) = split(key);
        self.entries.get(index as usize).is_some_and(|entry| entry.generation == generation && entry.value.is_some())
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn token(index: u32, generation: u32) -> Token {
    Token(u64::from(generation) << 32 | u64::from(index))
}

fn split(key: Token) -> (u32, u32) {
    ((key.0 & 0xffff_ffff) as u32, (key.0 >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_key_finds_nothing() {
        let mut slots = Slots::new();
        let first = slots.insert("first");
        assert_eq!(slots.remove(first), Some("first"));
        let second = slots.insert("second");
        assert_ne!(first, second);
        assert_eq!(slots.get_mut(first), None);
        assert_eq!(slots.remove(first), None);
        assert_eq!(slots.get_mut(second), Some(&mut "second"));
        assert_eq!(slots.keys(), [second]);
        assert!(!slots.is_empty());
        slots.remove(second);
        assert!(slots.is_empty());
    }

    #[test]
    fn keys_never_issued_find_nothing() {
        let mut slots = Slots::new();
        slots.insert(1);
        for key in [0, 1, u64::MAX, 7 << 32] {
            assert_eq!(slots.get_mut(Token(key)), None);
        }
    }
}
