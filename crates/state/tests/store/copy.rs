//! A copy that takes over: random flushes of the owner, while the other process reads a piece now and then.

use starwire_state::{Source, promote};

use super::*;

/// What the other process does between two flushes of the owner.
struct Follower<'a> {
    folder: &'a Folder,
    replica: Replica,
    source: Source,
    /// The file that is read, and how far.
    variable: (usize, u64),
}

impl<'a> Follower<'a> {
    fn new(owner: &Folder, folder: &'a Folder, piece: u64) -> Self {
        // A merge may be under way.
        let mut source = loop {
            if let Some(source) = Source::open(&owner.0).unwrap() {
                break source;
            }
            std::thread::yield_now();
        };
        source.set_piece(piece);
        Self { folder, replica: Replica::begin(&folder.0, TASK).unwrap(), source, variable: (0, 0) }
    }

    /// Copies one piece. False: there is nothing to copy; None: what follows is gone.
    fn step(&mut self, owner: &Store) -> Option<bool> {
        if let Some((id, bytes)) = self.source.variables().get(self.variable.0) {
            let piece = self.source.read_variable(*id, self.variable.1).unwrap();
            self.replica.write_variable(*id, self.variable.1, &piece).unwrap();
            self.variable.1 += piece.len() as u64;
            if self.variable.1 == *bytes {
                self.variable = (self.variable.0 + 1, 0);
            }
            return Some(true);
        }
        let (mut number, mut at) = self.replica.position();
        if number == 0 {
            (number, at) = (self.source.first_journal(), 0);
        }
        let journals: BTreeMap<u64, u64> = owner.journals().collect();
        // Its end may be forgotten, but not while it is the newest one that the copy has read.
        let end = journals.get(&number).copied()?;
        if at == end {
            if !journals.contains_key(&(number + 1)) {
                return Some(false);
            }
            (number, at) = (number + 1, 0);
        }
        let piece = self.source.read_journal(number, at, journals[&number]).unwrap()?;
        self.replica.write_journal(number, &piece).unwrap();
        Some(true)
    }

    fn take_over(mut self) -> Store {
        assert!(matches!(self.folder.open(), Err(StateError::InUse { .. })));
        self.replica.prepare().unwrap();
        self.replica.take_over("here:1").unwrap();
        self.folder.open().unwrap()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_copy_that_takes_over_has_what_the_owner_had(
        flushes in prop::collection::vec((changes(), any::<u8>(), merges(), 0..12u8), 1..14),
        begins in 0..6usize,
        limit in 0..2000u64,
        piece in 1..400u64,
    ) {
        let (folder, other) = (Folder::new(), Folder::new());
        let (mut model, mut store) = (Model::default(), folder.open().unwrap());
        let mut follower = None;
        for (number, (changes, calls, merges, steps)) in flushes.into_iter().enumerate() {
            store.set_journals(limit, merges);
            if calls % 8 == 0 {
                store.ask_for_journal();
            }
            let mut flush = store.begin().unwrap();
            make(&changes, &mut flush, &mut model);
            flush.commit(&[calls; 3]).unwrap();
            (model.calls, model.flush) = (vec![calls; 3], model.flush + 1);
            if number >= begins && follower.is_none() {
                follower = Some(Follower::new(&folder, &other, piece));
            }
            for _ in 0..steps {
                // One that is too far behind begins anew.
                if follower.as_mut().is_some_and(|follower| follower.step(&store).is_none()) {
                    drop(follower.take());
                    follower = Some(Follower::new(&folder, &other, piece));
                }
            }
        }
        let mut follower = follower.unwrap_or_else(|| Follower::new(&folder, &other, piece));
        loop {
            match follower.step(&store) {
                Some(true) => {}
                Some(false) => break,
                None => {
                    drop(follower);
                    follower = Follower::new(&folder, &other, piece);
                }
            }
        }
        store.hand_over("there:1").unwrap();
        drop(store);
        let store = follower.take_over();
        prop_assert_eq!(&state_of(&store), &model);
        prop_assert_eq!(store.incarnations(), [1, 2]);
        prop_assert!(error_of(&folder).ends_with(": the state has moved to there:1: remove the folder, or begin there"));
        drop(store);
        // And back, over what is left there.
        let store = other.open().unwrap();
        let mut follower = Follower::new(&other, &folder, piece);
        while follower.step(&store).unwrap() {}
        prop_assert_eq!(&state_of(&follower.take_over()), &model);
    }
}

#[test]
fn a_copy_is_no_state_until_it_takes_over() {
    let (folder, other) = (filled(), Folder::new());
    let has_taken_over = |folder: &Folder, from| Replica::has_taken_over(&folder.0, TASK, from);
    assert!(!has_taken_over(&other, "here:1").unwrap());
    let store = folder.open().unwrap();
    let mut follower = Follower::new(&folder, &other, 7);
    while follower.step(&store).unwrap() {}
    follower.replica.sync().unwrap();
    drop(follower);
    assert!(!has_taken_over(&other, "here:1").unwrap());
    assert!(error_of(&other).contains("has a copy that has not taken over: set STARWIRE_STATE_FROM"));
    let read = Snapshot::open(&other.0).map(drop).unwrap_err();
    assert!(matches!(read, StateError::Copy { .. }), "nor for readers: {read}");
    assert!(matches!(Replica::begin(&folder.0, TASK).map(drop), Err(StateError::InUse { .. })));
    drop(store);
    let error = Replica::begin(&folder.0, TASK).map(drop).unwrap_err().to_string();
    assert!(error.contains("has a state of its own: to make it a copy of another one, remove the folder"), "{error}");
    assert!(matches!(has_taken_over(&folder, "here:1"), Err(StateError::Taken { .. })));
    let store = folder.open().unwrap();
    let mut follower = Follower::new(&folder, &other, 7);
    while follower.step(&store).unwrap() {}
    drop(follower.take_over());
    assert!(has_taken_over(&other, "here:1").unwrap());
    assert!(matches!(has_taken_over(&other, "there:1"), Err(StateError::Taken { .. })), "from somewhere else");
}

#[test]
fn another_process_takes_up_a_complete_copy() {
    let (folder, other) = (filled(), Folder::new());
    let mut store = folder.open().unwrap();
    let mut follower = Follower::new(&folder, &other, 50);
    assert!(Replica::reopen(&other.0, TASK).unwrap().is_none());
    while follower.step(&store).unwrap() {}
    follower.replica.complete().unwrap();
    // Begins a journal, and leaves a part of a flush.
    store.ask_for_journal();
    let mut flush = store.begin().unwrap();
    flush.rows(1, 0, &[3; 16]);
    flush.commit(b"last").unwrap();
    for _ in 0..4 {
        follower.step(&store).unwrap();
    }
    let Follower { source, variable, replica, .. } = follower;
    let before = replica.position();
    drop(replica);
    let replica = Replica::reopen(&other.0, TASK).unwrap().unwrap();
    assert!(replica.position() <= before && replica.position().1 > 0);
    let mut follower = Follower { folder: &other, replica, source, variable };
    while follower.step(&store).unwrap() {}
    let taken = follower.take_over();
    // The files of its variables have everything once it is opened again.
    drop(store);
    assert_eq!(state_of(&taken), state_of(&folder.open().unwrap()));
    drop(taken);
    assert!(Replica::reopen(&other.0, TASK).unwrap().is_none(), "it is no copy any more");
}

#[test]
fn a_copy_is_promoted_by_hand() {
    let (folder, other) = (filled(), Folder::new());
    assert!(matches!(promote(&folder.0), Err(StateError::NoCopy { .. })));
    let store = folder.open().unwrap();
    let mut follower = Follower::new(&folder, &other, 1000);
    while follower.step(&store).unwrap() {}
    assert!(!follower.replica.is_promoted());
    assert!(matches!(promote(&other.0), Err(StateError::NoCopy { .. })), "nobody knows that it is complete");
    follower.replica.complete().unwrap();
    assert!(promote(&other.0).unwrap(), "a process keeps the copy");
    assert!(follower.replica.is_promoted());
    drop(follower);
    assert!(!promote(&other.0).unwrap(), "it has ended");
    assert_eq!(state_of(&other.open().unwrap()), state_of(&store));
    assert!(matches!(promote(&other.0), Err(StateError::NoCopy { .. })));
}
