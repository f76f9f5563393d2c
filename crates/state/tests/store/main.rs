//! The state in a folder: random flushes, with processes that die and machines that lose power in between.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod copy;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;
use starwire_state::{Definition, Merges, Replica, Snapshot, StateError, Store};

const TASK: &str = "/job:ps/replica:0/task:0";

/// A folder that is removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        Self(std::env::temp_dir().join(format!("starwire-state-{}-{number}", std::process::id())))
    }

    fn open(&self) -> Result<Store, StateError> {
        Store::open(&self.0, TASK, &[1, 2])
    }

    fn files(&self, prefix: &str) -> Vec<PathBuf> {
        let paths = fs::read_dir(&self.0).unwrap().map(|entry| entry.unwrap().path());
        paths.filter(|path| path.file_name().unwrap().to_str().unwrap().starts_with(prefix)).collect()
    }

    /// The only one.
    fn journal(&self) -> PathBuf {
        let [journal] = &self.files("journal-")[..] else { panic!("one journal") };
        journal.clone()
    }

    fn newest_journal(&self) -> PathBuf {
        let number = |path: &PathBuf| path.to_str()?.rsplit('-').next()?.parse::<u64>().ok();
        self.files("journal-").into_iter().max_by_key(number).unwrap()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn definition(rows: u64, row_bytes: u64) -> Definition {
    Definition { bytes: b"what it is".to_vec(), dims: vec![rows, row_bytes], rows, row_bytes }
}

/// What the state should be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Model {
    variables: BTreeMap<u32, (Definition, Vec<u8>)>,
    calls: Vec<u8>,
    flush: u64,
}

fn state_of(store: &Store) -> Model {
    let all: Vec<(u32, Definition)> = store.variables().map(|(id, definition)| (id, definition.clone())).collect();
    let read = |(id, definition): (u32, Definition)| {
        let mut content = vec![0; usize::try_from(definition.size().unwrap()).unwrap()];
        store.read(id, &mut content).unwrap();
        (id, (definition, content))
    };
    Model { variables: all.into_iter().map(read).collect(), calls: store.calls().to_vec(), flush: store.last_flush().0 }
}

/// Checks that a reader has the variables of this model, whatever has happened since.
fn assert_reads(folder: &Folder, snapshot: &Snapshot, model: &Model) {
    let definitions: BTreeMap<u32, Definition> = snapshot.variables().map(|(id, is)| (id, is.clone())).collect();
    let (mut places, mut end) = (BTreeMap::new(), 3);
    for (id, definition) in &definitions {
        places.insert(*id, end);
        end += definition.size().unwrap();
    }
    let path = folder.0.with_extension("copy");
    let out = fs::File::create(&path).unwrap();
    out.set_len(end).unwrap();
    snapshot.copy(&places, &out, &path).unwrap();
    let copy = fs::read(&path).unwrap();
    fs::remove_file(&path).unwrap();
    let size = |bytes: u64| usize::try_from(bytes).unwrap();
    let read = |(id, definition): (u32, Definition)| {
        let content = copy[size(places[&id])..][..size(definition.size().unwrap())].to_vec();
        (id, (definition, content))
    };
    assert_eq!(definitions.into_iter().map(read).collect::<BTreeMap<_, _>>(), model.variables);
    assert_eq!((snapshot.last_flush().0, snapshot.task()), (model.flush, TASK));
}

/// Checks that an older model, whose flush began at that time, and what has changed since make the newer one. Returns
/// whether the journal says it.
fn assert_changes(folder: &Folder, snapshot: &Snapshot, (older, time): (&Model, u64), newer: &Model) -> bool {
    let Some(changes) = snapshot.changes((older.flush, time)).unwrap() else { return false };
    let (mut places, mut end) = (BTreeMap::new(), 7);
    for (id, definition) in snapshot.variables() {
        places.insert(id, end);
        end += changes.rows(id).map_or(0, |rows| rows.len() as u64) * definition.row_bytes;
    }
    let path = folder.0.with_extension("changes");
    let out = fs::File::create(&path).unwrap();
    out.set_len(end).unwrap();
    snapshot.copy_changes(older.flush, &changes, &places, &out, &path).unwrap();
    let copy = fs::read(&path).unwrap();
    assert_eq!(copy.len() as u64, end);
    fs::remove_file(&path).unwrap();
    let mut made = BTreeMap::new();
    for (id, (definition, content)) in &newer.variables {
        let size = |rows: u64| usize::try_from(rows * definition.row_bytes).unwrap();
        let (mut all, rows) = match older.variables.get(id) {
            Some((_, old)) => (old.clone(), changes.rows(*id).unwrap_or_default()),
            None => (vec![0; content.len()], (0..definition.rows).collect()),
        };
        let mut at = usize::try_from(places[id]).unwrap();
        for row in rows {
            all[size(row)..size(row + 1)].copy_from_slice(&copy[at..][..size(1)]);
            at += size(1);
        }
        made.insert(*id, (definition.clone(), all));
    }
    assert_eq!(made, newer.variables);
    true
}

#[derive(Clone, Debug)]
enum Change {
    New { rows: u64, row_bytes: u64, content: u8 },
    Rows { variable: usize, first: u64, count: u64, content: u8 },
    Gone { variable: usize },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Commit,
    /// The process dies before the commit, and leaves a part of its bytes.
    Dies {
        leaves: u64,
    },
    /// The process dies after the commit.
    CommitAndDies,
    /// The same, and the files of the variables are as old as the journals allow.
    LosesPower,
    /// The process dies when the next flush begins: in a merge, if there is one, when some files are still old.
    DiesInMerge {
        old: u8,
    },
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let new = (0..40u64, 1..20u64, any::<u8>()).prop_map(|(rows, row_bytes, content)| Change::New {
        rows,
        row_bytes,
        content,
    });
    let rows = (any::<usize>(), 0..40u64, 0..9u64, any::<u8>())
        .prop_map(|(variable, first, count, content)| Change::Rows { variable, first, count, content });
    let gone = any::<usize>().prop_map(|variable| Change::Gone { variable });
    prop::collection::vec(prop_oneof![2 => new, 8 => rows, 1 => gone], 0..8)
}

fn end() -> impl Strategy<Value = End> {
    prop_oneof![
        6 => Just(End::Commit),
        2 => (0..2000u64).prop_map(|leaves| End::Dies { leaves }),
        1 => Just(End::CommitAndDies),
        2 => Just(End::LosesPower),
        2 => any::<u8>().prop_map(|old| End::DiesInMerge { old }),
    ]
}

/// Makes the changes, in the flush and in the model.
fn make(changes: &[Change], flush: &mut starwire_state::Flush<'_>, model: &mut Model) {
    for change in changes {
        let ids: Vec<u32> = model.variables.keys().copied().collect();
        let id_of = |variable: usize| ids[variable % ids.len()];
        match *change {
            Change::New { rows, row_bytes, content } => {
                let definition = definition(rows, row_bytes);
                let id = flush.variable(definition.clone());
                let all = vec![content; usize::try_from(rows * row_bytes).unwrap()];
                flush.rows(id, 0, &all);
                assert!(model.variables.insert(id, (definition, all)).is_none(), "ids are new");
            }
            Change::Rows { .. } | Change::Gone { .. } if ids.is_empty() => {}
            Change::Rows { variable, first, count, content } => {
                let (definition, all) = model.variables.get_mut(&id_of(variable)).unwrap();
                let first = first.min(definition.rows);
                let count = count.min(definition.rows - first);
                let size = |rows| usize::try_from(rows * definition.row_bytes).unwrap();
                let part = &mut all[size(first)..size(first + count)];
                part.fill(content);
                flush.rows(id_of(variable), first, part);
            }
            Change::Gone { variable } => {
                flush.gone(id_of(variable));
                model.variables.remove(&id_of(variable));
            }
        }
    }
}

/// One flush; returns what the state then should be.
fn write(store: &mut Store, model: &mut Model, changes: &[Change]) -> Model {
    let mut flush = store.begin().unwrap();
    make(changes, &mut flush, model);
    flush.commit(b"").unwrap();
    model.flush += 1;
    model.clone()
}

fn files_of(folder: &Folder, prefix: &str) -> Vec<(PathBuf, Vec<u8>)> {
    folder.files(prefix).into_iter().map(|path| (path.clone(), fs::read(path).unwrap())).collect()
}

fn put_back<'a>(files: impl Iterator<Item = &'a (PathBuf, Vec<u8>)>) {
    files.for_each(|(path, content)| fs::write(path, content).unwrap());
}

fn merges() -> impl Strategy<Value = Merges> {
    prop_oneof![Just(Merges::Beside), Just(Merges::AtOnce), Just(Merges::Never)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 250, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_was_committed_is_there_and_nothing_else(
        flushes in prop::collection::vec((changes(), end(), any::<u8>(), any::<bool>(), merges()), 1..14),
        limit in 0..2000u64,
    ) {
        let folder = Folder::new();
        let mut model = Model::default();
        let mut store = folder.open().unwrap();
        let mut older = (model.clone(), store.last_flush().1);
        // As they were when the oldest journal began: whatever was written to them since may be lost with the power.
        let (mut oldest, mut safe) = (folder.journal(), files_of(&folder, "variable-"));
        for (changes, end, calls, reads, merges) in flushes {
            // Otherwise it is not known when a merge ends.
            let merges = if end == End::Commit || merges != Merges::Beside { merges } else { Merges::AtOnce };
            store.set_journals(limit, merges);
            let mut next = model.clone();
            let reader = reads.then(|| (Snapshot::open(&folder.0).unwrap(), model.clone()));
            if let Some((snapshot, model)) = &reader {
                assert_changes(&folder, snapshot, (&older.0, older.1), model);
                older = (model.clone(), snapshot.last_flush().1);
            }
            let newest = folder.newest_journal();
            drop(store.begin().unwrap());
            // A reader may have kept it from merging.
            let journals = folder.files("journal-");
            if merges == Merges::AtOnce && journals.len() == 1 && journals[0] != oldest {
                (oldest, safe) = (folder.journal(), files_of(&folder, "variable-"));
                prop_assert!(oldest == newest || safe.len() == model.variables.len(), "variables that are gone");
            }
            let mut flush = store.begin().unwrap();
            make(&changes, &mut flush, &mut next);
            let finish = || reader.iter().for_each(|(snapshot, model)| assert_reads(&folder, snapshot, model));
            if let End::Dies { leaves } = end {
                drop(flush);
                finish();
                let journal = folder.newest_journal();
                let length = fs::metadata(&journal).unwrap().len();
                drop(store);
                fs::OpenOptions::new().write(true).open(&journal).unwrap().set_len(length.saturating_sub(leaves).max(
                    length.min(committed(&journal)))).unwrap();
                drop(reader);
            } else {
                flush.commit(&[calls; 3]).unwrap();
                finish();
                (next.calls, next.flush) = (vec![calls; 3], next.flush + 1);
                model = next;
                drop(reader);
                match end {
                    End::Commit => continue,
                    End::LosesPower => {
                        drop(store);
                        if folder.files("journal-").contains(&oldest) {
                            put_back(safe.iter());
                        }
                    }
                    End::DiesInMerge { old } => {
                        // One that is under way ends first.
                        store.set_journals(u64::MAX, Merges::AtOnce);
                        drop(store.begin().unwrap());
                        let before = [files_of(&folder, "journal-"), files_of(&folder, "variable-")].concat();
                        store.set_journals(0, Merges::AtOnce);
                        drop(store.begin().unwrap());
                        drop(store);
                        let is_old = |(at, file): &(usize, _)| *at == 0 || old >> (at % 8) & 1 != 0 || !file_exists(file);
                        put_back(before.iter().enumerate().filter(is_old).map(|(_, file)| file));
                    }
                    End::Dies { .. } | End::CommitAndDies => drop(store),
                }
            }
            store = folder.open().unwrap();
            prop_assert_eq!(&state_of(&store), &model);
            prop_assert_eq!(store.incarnations(), [1, 2]);
            (oldest, safe) = (folder.journal(), files_of(&folder, "variable-"));
        }
    }
}

fn file_exists((path, _): &&(PathBuf, Vec<u8>)) -> bool {
    path.exists()
}

#[test]
fn the_files_of_variables_do_not_change_while_somebody_reads_them() {
    let folder = Folder::new();
    let mut store = folder.open().unwrap();
    assert!(matches!(Snapshot::open(&folder.0.join("none")), Err(StateError::Io { .. })));
    store.set_journals(0, Merges::AtOnce);
    let mut model = Model::default();
    let mut write = |store: &mut Store, changes: &[Change]| write(store, &mut model, changes);
    write(&mut store, &[Change::New { rows: 9, row_bytes: 8, content: 1 }]);
    let first = folder.journal();
    let before = write(&mut store, &[Change::Rows { variable: 0, first: 3, count: 2, content: 2 }]);
    let time_before = store.last_flush().1;
    let second = folder.journal();
    assert_ne!(first, second, "a new journal for each flush");
    let snapshot = Snapshot::open(&folder.0).unwrap();
    for content in 3..9 {
        write(&mut store, &[Change::Rows { variable: 0, first: content.into(), count: 5, content }]);
        assert_eq!(folder.journal(), second);
    }
    assert_reads(&folder, &snapshot, &before);
    drop(snapshot);
    let after = write(&mut store, &[Change::New { rows: 3, row_bytes: 8, content: 1 }]);
    let time_after = store.last_flush().1;
    assert_ne!(folder.journal(), second);
    let snapshot = Snapshot::open(&folder.0).unwrap();
    assert!(!assert_changes(&folder, &snapshot, (&before, time_before), &after), "the journal is younger");
    drop(snapshot);
    store.set_journals(1 << 20, Merges::AtOnce);
    let newer = write(&mut store, &[Change::Rows { variable: 1, first: 1, count: 1, content: 9 }]);
    let snapshot = Snapshot::open(&folder.0).unwrap();
    assert!(assert_changes(&folder, &snapshot, (&after, time_after), &newer));
    assert!(snapshot.changes((newer.flush + 1, snapshot.last_flush().1)).unwrap().is_none(), "of another state");
}

/// A flush that is lost has a number that another one then gets: of a copy that lacked it, or, as here, in the same
/// folder, after a commit that was seen before it was on the disk.
#[test]
fn what_has_changed_since_a_flush_that_was_lost_is_not_known() {
    let folder = filled();
    let journal = folder.journal();
    let kept = (fs::read(&journal).unwrap(), folder.open().unwrap().last_flush());
    let flush = |row: u64| {
        let mut store = folder.open().unwrap();
        let mut flush = store.begin().unwrap();
        flush.rows(1, row, &[5; 8]);
        flush.commit(b"").unwrap();
        drop(store);
        Snapshot::open(&folder.0).unwrap().last_flush()
    };
    let lost = flush(0);
    let with_lost = fs::read(&journal).unwrap();
    assert_eq!(Snapshot::open(&folder.0).unwrap().changes(lost).unwrap().unwrap().rows(1), None);
    fs::write(&journal, kept.0).unwrap();
    // The number is the same, and so must not be the millisecond.
    std::thread::sleep(std::time::Duration::from_millis(3));
    assert_eq!(flush(2).0, lost.0);
    let other = fs::read(&journal).unwrap();
    flush(3);
    let snapshot = Snapshot::open(&folder.0).unwrap();
    assert!(snapshot.changes(lost).unwrap().is_none());
    assert_eq!(snapshot.changes(kept.1).unwrap().unwrap().rows(1).unwrap(), [2, 3]);
    drop(snapshot);
    // Whoever has begun to read the one must not mix the two.
    fs::write(&journal, with_lost).unwrap();
    let reads = Snapshot::open(&folder.0).unwrap();
    fs::write(&journal, other).unwrap();
    assert!(matches!(reads.changes(kept.1).map(drop), Err(StateError::Withdrawn { .. })));
}

#[test]
fn a_server_that_starts_waits_for_readers() {
    let folder = Folder::new();
    drop(folder.open().unwrap());
    let snapshot = Snapshot::open(&folder.0).unwrap();
    let (begins, begun) = std::sync::mpsc::channel();
    std::thread::scope(|threads| {
        let server = threads.spawn(|| {
            begins.send(()).unwrap();
            state_of(&folder.open().unwrap())
        });
        begun.recv().unwrap();
        // It must not start, so this waits for what does not happen.
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!server.is_finished(), "it starts beside a reader");
        drop(snapshot);
        assert_eq!(server.join().unwrap(), Model::default());
    });
}

#[test]
fn a_flush_without_changes_is_empty() {
    let folder = Folder::new();
    let mut store = folder.open().unwrap();
    assert!(store.begin().unwrap().is_empty());
    let mut flush = store.begin().unwrap();
    let id = flush.variable(definition(2, 4));
    assert!(!flush.is_empty());
    flush.rows(id, 0, &[1; 8]);
    flush.commit(b"").unwrap();
    let mut flush = store.begin().unwrap();
    assert!(flush.is_empty());
    flush.rows(id, 1, &[2; 4]);
    assert!(!flush.is_empty(), "rows that are still collected");
}

#[test]
fn a_folder_that_is_removed_while_it_is_used_is_an_error() {
    let folder = Folder::new();
    let mut store = folder.open().unwrap();
    fill(&mut store);
    let mut flush = store.begin().unwrap();
    flush.variable(definition(4, 8));
    fs::remove_dir_all(&folder.0).unwrap();
    let error = flush.commit(b"").unwrap_err().to_string();
    assert!(error.contains("cannot write: the file was removed"), "{error}");
    let error = store.begin().err().expect("an error").to_string();
    assert!(error.contains("cannot write: the file was removed"), "{error}");
}

/// Where the last commit of a journal ends: a copy of it is opened, which cuts off the rest.
fn committed(journal: &Path) -> u64 {
    let copy = Folder::new();
    let from = journal.parent().unwrap();
    fs::create_dir_all(&copy.0).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, copy.0.join(path.file_name().unwrap())).unwrap();
    }
    drop(copy.open().unwrap());
    fs::metadata(copy.journal()).unwrap().len()
}

/// A folder with one variable and three commits.
fn filled() -> Folder {
    let folder = Folder::new();
    fill(&mut folder.open().unwrap());
    folder
}

fn fill(store: &mut Store) {
    let mut flush = store.begin().unwrap();
    let id = flush.variable(definition(4, 8));
    flush.rows(id, 0, &[7; 32]);
    flush.commit(b"one").unwrap();
    for content in [8, 9] {
        let mut flush = store.begin().unwrap();
        flush.rows(id, 1, &[content; 8]);
        flush.commit(b"more").unwrap();
    }
}

fn error_of(folder: &Folder) -> String {
    folder.open().err().expect("an error").to_string()
}

#[test]
fn a_folder_belongs_to_one_process_and_one_task() {
    let folder = filled();
    let store = folder.open().unwrap();
    assert_eq!(error_of(&folder), format!("{} is in use by another process", folder.0.display()));
    drop(store);
    let other = Store::open(&folder.0, "/job:ps/replica:0/task:1", &[3]).err().expect("an error").to_string();
    let expected = format!("{} is the state of {TASK}, not of /job:ps/replica:0/task:1", folder.journal().display());
    assert_eq!(other, expected);
    assert_eq!(folder.open().unwrap().last_flush().0, 3);
}

#[test]
fn only_its_user_can_enter_a_folder() {
    let mode = |folder: &Folder| fs::metadata(&folder.0).unwrap().permissions().mode() & 0o777;
    let (folder, copy) = (Folder::new(), Folder::new());
    drop(folder.open().unwrap());
    assert_eq!(mode(&folder), 0o700);
    drop(Replica::begin(&copy.0, TASK).unwrap());
    assert_eq!(mode(&copy), 0o700);
}

#[test]
fn files_of_others_are_not_touched() {
    for name in ["notes.txt", "journal-x", "variable-", "variable-1x", "journal-1.old"] {
        let folder = filled();
        let path = folder.0.join(name);
        fs::write(&path, b"mine").unwrap();
        let expected = format!(
            "{} is no file of starwire's: the folder must be empty, or have the state of {TASK}",
            path.display()
        );
        assert_eq!(error_of(&folder), expected);
        assert_eq!(fs::read(&path).unwrap(), b"mine");
    }
    let folder = Folder::new();
    fs::create_dir_all(&folder.0).unwrap();
    for (name, content) in [("variable-3", "variable"), ("journal-2", "no journal at all")] {
        fs::write(folder.0.join(name), content).unwrap();
        assert!(error_of(&folder).contains(&format!("{name} is no file of starwire's")), "{name}");
        assert_eq!(fs::read(folder.0.join(name)).unwrap(), content.as_bytes());
    }
}

#[test]
fn damage_before_a_commit_is_an_error_and_after_the_last_one_is_cut_off() {
    let folder = filled();
    let journal = folder.journal();
    let whole = fs::read(&journal).unwrap();
    let (mut errors, mut cut) = (0, 0);
    for at in 0..whole.len() {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x40;
        fs::write(&journal, &damaged).unwrap();
        match folder.open() {
            Ok(store) => {
                // A damaged length hides what follows.
                cut += 1;
                assert!(store.last_flush().0 < 3, "byte {at}");
            }
            Err(error) => {
                errors += 1;
                let text = error.to_string();
                assert!(text.contains(journal.to_str().unwrap()), "{text}");
                assert_eq!(fs::read(&journal).unwrap(), damaged, "nothing is overwritten");
            }
        }
        fs::write(&journal, &whole).unwrap();
    }
    assert!(errors > 100 && cut > 10, "{errors} {cut}");
    assert_eq!(folder.open().unwrap().last_flush().0, 3);
}

#[test]
fn a_newer_format_and_a_variable_of_another_length_are_errors() {
    let folder = filled();
    let mut store = folder.open().unwrap();
    store.set_journals(0, Merges::AtOnce);
    // A journal that begins with the variable.
    drop(store.begin().unwrap());
    drop(store);
    let [variable] = &folder.files("variable-")[..] else { panic!("one variable") };
    fs::write(variable, [0; 31]).unwrap();
    assert_eq!(error_of(&folder), format!("{} is damaged: it has 31 bytes instead of 32", variable.display()));
    fs::remove_file(variable).unwrap();
    assert!(error_of(&folder).starts_with(&format!("{}: cannot open: ", variable.display())));

    let folder = filled();
    let mut journal = fs::read(folder.journal()).unwrap();
    journal[21] = 9;
    let checksum = crc32c::crc32c_append(crc32c::crc32c(&journal[..8]), &journal[12..13 + usize::from(journal[0])]);
    journal[8..12].copy_from_slice(&checksum.to_le_bytes());
    fs::write(folder.journal(), &journal).unwrap();
    let expected = format!("{} has version 9 of the format; this starwire reads version 1", folder.journal().display());
    assert_eq!(error_of(&folder), expected);
}

#[test]
fn a_folder_takes_at_most_three_times_the_variables_and_a_flush() {
    let folder = Folder::new();
    let mut store = folder.open().unwrap();
    store.set_journals(0, Merges::Beside);
    let mut flush = store.begin().unwrap();
    let id = flush.variable(definition(1000, 100));
    flush.rows(id, 0, &vec![1; 100_000]);
    flush.commit(b"").unwrap();
    for round in 0..200u64 {
        let mut flush = store.begin().unwrap();
        flush.rows(id, round % 90 * 10, &[2; 10_000]);
        assert!(flush.commit(b"").unwrap().bytes < 10_200);
        let length = |path: PathBuf| fs::metadata(path).map_or(0, |file| file.len());
        let bytes: u64 = fs::read_dir(&folder.0).unwrap().map(|entry| length(entry.unwrap().path())).sum();
        assert!(bytes < 324_000, "{bytes}");
    }
}

#[test]
fn a_reader_has_what_is_in_an_old_journal() {
    let folder = Folder::new();
    let mut store = folder.open().unwrap();
    let mut model = Model::default();
    let mut write = |store: &mut Store, changes: &[Change]| write(store, &mut model, changes);
    let first = write(&mut store, &[Change::New { rows: 9, row_bytes: 8, content: 1 }]);
    let time = store.last_flush().1;
    write(
        &mut store,
        &[Change::New { rows: 4, row_bytes: 2, content: 1 }, Change::New { rows: 1, row_bytes: 2, content: 1 }],
    );
    store.set_journals(0, Merges::Never);
    write(&mut store, &[Change::Rows { variable: 0, first: 2, count: 3, content: 4 }, Change::Gone { variable: 1 }]);
    let last = write(&mut store, &[Change::Rows { variable: 0, first: 4, count: 3, content: 5 }]);
    assert_eq!(folder.files("journal-").len(), 2, "the second is not followed by a third while the first is there");
    let snapshot = Snapshot::open(&folder.0).unwrap();
    assert_reads(&folder, &snapshot, &last);
    assert!(assert_changes(&folder, &snapshot, (&first, time), &last));
    drop((snapshot, store));
    assert_eq!(state_of(&folder.open().unwrap()), last);
    assert_eq!(folder.files("journal-").len(), 1);
}

#[test]
fn damage_in_a_journal_that_is_merged_is_an_error() {
    let folder = Folder::new();
    let mut store = folder.open().unwrap();
    fill(&mut store);
    let journal = folder.journal();
    let mut content = fs::read(&journal).unwrap();
    let at = content.len() - 60;
    content[at] ^= 1;
    fs::write(&journal, content).unwrap();
    store.set_journals(0, Merges::AtOnce);
    let error = store.begin().err().expect("not all of it can be read").to_string();
    assert!(error.contains("is damaged at byte") && error.contains(journal.to_str().unwrap()), "{error}");
    assert!(journal.exists(), "nothing of it is lost");
}

#[test]
fn a_folder_whose_state_has_moved_is_read_by_nobody() {
    let folder = filled();
    assert_eq!(Snapshot::open(&folder.0).unwrap().task(), TASK);
    folder.open().unwrap().hand_over("there:1").unwrap();
    let error = Snapshot::open(&folder.0).err().expect("what is left is older").to_string();
    assert!(error.contains("there:1") && error.contains(folder.0.to_str().unwrap()), "{error}");
}

#[test]
#[ignore = "takes 4 GiB of memory, and as much of the disk"]
fn a_row_may_be_longer_than_a_gigabyte() {
    let folder = Folder::new();
    let mut store = folder.open().unwrap();
    store.set_journals(u64::MAX, Merges::Never);
    let bytes = (1 << 30) + 4096;
    let mut flush = store.begin().unwrap();
    let (long, short) = (flush.variable(definition(1, bytes)), flush.variable(definition(2, 4)));
    let content: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    flush.rows(long, 0, &content);
    flush.rows(short, 0, &[3; 8]);
    flush.commit(b"after it").unwrap();
    drop(store);
    let store = folder.open().unwrap();
    assert_eq!((store.last_flush().0, store.calls()), (1, &b"after it"[..]));
    let mut read = vec![0; content.len()];
    store.read(long, &mut read).unwrap();
    assert!(read == content);
    let mut read = [0; 8];
    store.read(short, &mut read).unwrap();
    assert_eq!(read, [3; 8]);
}
