//! Memory of received and outgoing blocks, shared by all connections of a thread: even a server with thousands of
//! connections handles few blocks at a time, and an idle connection keeps none.

use std::cell::RefCell;

/// Vectors of each kind that a thread keeps …
const VECTORS: usize = 8;
/// … of at most this capacity.
const CAPACITY: usize = 1 << 20;

thread_local! {
    static OUT: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
    static IN: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
}

/// An empty vector to build a block in.
pub fn take_out() -> Vec<u8> {
    OUT.with_borrow_mut(Vec::pop).unwrap_or_default()
}

pub fn give_out(mut vector: Vec<u8>) {
    vector.clear();
    OUT.with_borrow_mut(|kept| keep(kept, vector));
}

/// At least `len` bytes of any content to receive into.
pub fn take_in(len: usize) -> Vec<u8> {
    let mut vector = IN.with_borrow_mut(Vec::pop).unwrap_or_default();
    if vector.len() < len {
        vector.resize(len, 0);
    }
    vector
}

pub fn give_in(vector: Vec<u8>) {
    IN.with_borrow_mut(|kept| keep(kept, vector));
}

fn keep(kept: &mut Vec<Vec<u8>>, vector: Vec<u8>) {
    if !(1..=CAPACITY).contains(&vector.capacity()) {
        return;
    }
    if kept.len() < VECTORS {
        kept.push(vector);
    } else if let Some(smallest) = kept.iter_mut().min_by_key(|kept| kept.capacity()) {
        // Small ones are cheap to allocate again.
        if smallest.capacity() < vector.capacity() {
            *smallest = vector;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_is_used_again() {
        give_out(vec![1; 100]);
        let again = take_out();
        assert!(again.is_empty() && again.capacity() >= 100);
        assert_eq!(take_out().capacity(), 0);
        give_in(vec![1; 100]);
        assert_eq!(take_in(50).len(), 100);
        assert_eq!(take_in(50), [0; 50]);
    }

    #[test]
    fn not_everything_is_kept() {
        give_out(Vec::with_capacity(CAPACITY + 1));
        assert_eq!(take_out().capacity(), 0);
        (0..2 * VECTORS).for_each(|_| give_in(vec![0; 10]));
        assert_eq!(IN.with_borrow(Vec::len), VECTORS);
        give_in(vec![0; 20]);
        let mut kept: Vec<usize> = (0..VECTORS).map(|_| take_in(0).len()).collect();
        kept.sort_unstable();
        assert_eq!(kept, [[10; VECTORS - 1].as_slice(), &[20]].concat());
    }
}
