//! A copy that takes over: random flushes of the owner, while the other process reads a piece now and then.

use starwire_state::{Loaded, Source, promote};

use super::*;

/// What the other process does between two flushes of the owner.
struct Follower<'a> {
    folder: &'a Folder,
    replica: Replica,
    source: Source,
    /// The file that is read, and how far.
    variable: (usize, u64),
    loaded: Option<Loaded>,
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
        Self { folder, replica: Replica::begin(&folder.0, TASK).unwrap(), source, variable: (0, 0), loaded: None }
    }

    /// Reads a copy that has everything, if it has one journal only.
    fn load(&mut self) {
        if let Some(journal) = self.replica.only_journal() {
            self.loaded = Loaded::read(&self.folder.0, journal).unwrap();
        }
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
        self.loaded.into_iter().for_each(|loaded| loaded.wait(&self.folder.0));
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
                match follower.as_mut().map(|follower| follower.step(&store)) {
                    Some(None) => {
                        drop(follower.take());
                        follower = Some(Follower::new(&folder, &other, piece));
                    }
                    Some(Some(false)) if calls % 2 == 0 => follower.iter_mut().for_each(Follower::load),
                    _ => {}
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
        for (id, (_, expected)) in &model.variables {
            if let Some(mut taken) = store.take(*id) {
                prop_assert_eq!(&*taken.bytes_mut(), &expected[..]);
            }
        }
        prop_assert_eq!(store.loaded(), 0);
        drop(store);
        let store = other.open().unwrap();
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
    let has_taken_over = |folder: &Folder, from| Replica::has_taken_over(&folder.0, from);
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
    // Another process has the folder, and is about to mark it.
    std::fs::write(other.0.join("moved.new"), "").unwrap();
    assert!(has_taken_over(&other, "here:1").unwrap());
    assert!(other.0.join("moved.new").exists());
    // Nobody may conclude from this that the state is another one, and be told to remove it.
    std::fs::remove_file(other.0.join("from")).unwrap();
    std::fs::create_dir(other.0.join("from")).unwrap();
    let error = has_taken_over(&other, "here:1").unwrap_err().to_string();
    assert!(error.contains("from: cannot read: "), "{error}");
}

#[test]
fn root_does_not_promote_the_copy_of_another_user() {
    let folder = Folder::new();
    std::fs::create_dir_all(&folder.0).unwrap();
    match std::os::unix::fs::chown(&folder.0, Some(65_534), None) {
        Ok(()) => {
            let error = promote(&folder.0).unwrap_err().to_string();
            assert!(error.contains(" belongs to user 65534, who might not be able to read what root"), "{error}");
        }
        // Only root has others' folders.
        Err(_) => assert!(matches!(promote(&folder.0), Err(StateError::NoCopy { .. }))),
    }
}

/// Changes, new variables and variables that are gone, after the copy was read.
#[test]
fn what_was_read_before_has_what_came_since() {
    for journal in [false, true] {
        let (folder, other) = (filled(), Folder::new());
        let mut store = folder.open().unwrap();
        let mut follower = Follower::new(&folder, &other, 50);
        while follower.step(&store).unwrap() {}
        follower.load();
        let mut flush = store.begin().unwrap();
        let (gone, new) = (flush.variable(definition(2, 2)), flush.variable(definition(2, 2)));
        flush.rows(1, 0, &[9; 8]);
        flush.rows(new, 0, &[7; 4]);
        flush.gone(gone);
        flush.commit(b"next").unwrap();
        if journal {
            store.ask_for_journal();
            let mut flush = store.begin().unwrap();
            flush.rows(1, 0, &[8; 8]);
            flush.commit(b"last").unwrap();
        }
        while follower.step(&store).unwrap() {}
        let store = follower.take_over();
        let expected = state_of(&store);
        assert_eq!(expected.variables[&1].1[..8], if journal { [8; 8] } else { [9; 8] });
        assert_eq!(expected.variables[&new].1, [7; 4]);
        // Another journal may have changed the files while they were read.
        assert_eq!(store.loaded() == 0, journal);
        for (id, (_, content)) in &expected.variables {
            match store.take(*id) {
                Some(mut taken) => {
                    assert_eq!(taken.bytes_mut(), content);
                    assert_eq!(taken.bytes().as_ptr().align_offset(64), 0);
                }
                None => assert!(journal),
            }
        }
        assert!(store.take(gone).is_none() && store.take(1).is_none());
        // The files may lack what is in the journal: whoever opens them next merges it.
        drop(store);
        assert_eq!(state_of(&other.open().unwrap()), expected);
    }
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
    let Follower { source, variable, replica, loaded, .. } = follower;
    let before = replica.position();
    drop(replica);
    let replica = Replica::reopen(&other.0, TASK).unwrap().unwrap();
    assert!(replica.position() <= before && replica.position().1 > 0);
    let mut follower = Follower { folder: &other, replica, source, variable, loaded };
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
