//! A copy of a state in another process, which takes over from the owner: a standby, or the next owner of a state that
//! moves.
//!
//! The owner reads ([`Source`]): the files of the variables as they are while nobody changes them, then the oldest
//! journal and those that follow, as far as they are committed. The other process writes the same files ([`Replica`]),
//! and merges its journals itself. Its folder has a mark until it takes over; the owner's has one from the moment at
//! which it has handed the state over. No process opens a state with either mark.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use crate::error::{StateError, at};
use crate::files::{COPY, FROM, Files, MOVED, NEW, PROMOTE, is_marked, journal_path, journals, variable_path};
use crate::journal::{Journal, after, each};
use crate::lock::{lock, owner_beside_root, try_share};
use crate::merge::{merge, remove};
use crate::record::{Record, size};
use starwire_marks::fail_point;

/// No reader gets more at once.
pub const PIECE: u64 = 4 << 20;

/// The state as its owner gives it away.
pub struct Source {
    folder: PathBuf,
    /// The files of the variables stay as they are, until the first journal is read.
    shared: Option<File>,
    /// With which the oldest journal begins: id and bytes.
    variables: Vec<(u32, u64)>,
    first_journal: u64,
    journal: Option<(u64, File)>,
    piece: u64,
}

impl Source {
    /// None: not now, because the owner changes these files.
    pub fn open(folder: &Path) -> Result<Option<Self>, StateError> {
        let Some(shared) = try_share(folder)? else { return Ok(None) };
        let nothing = || StateError::Nothing { folder: folder.into() };
        let (first_journal, path) = journals(folder)?.into_iter().next().ok_or_else(nothing)?;
        let file = File::open(&path).map_err(at(&path, "open"))?;
        let length = file.metadata().map_err(at(&path, "examine"))?.len();
        let (mut variables, mut has_begun, mut position) = (Vec::new(), false, 0);
        // What follows may be long.
        while let Some(next) = after(&file, &path, position, length)?.filter(|_| !has_begun) {
            each(&file, &path, position, next, |_, record| {
                match record {
                    Record::Variable { id, definition } => {
                        variables.push((id, definition.size().unwrap_or_default()));
                    }
                    Record::Commit { .. } => has_begun = true,
                    _ => {}
                }
                Ok(())
            })?;
            position = next;
        }
        let journal = Some((first_journal, file));
        let (folder, shared) = (folder.into(), Some(shared));
        Ok(Some(Self { folder, shared, variables, first_journal, journal, piece: PIECE }))
    }

    /// For a copy that has everything before this; `crc` is that of the last `tail` bytes of it. None: it is no copy of
    /// this state.
    pub fn resume(
        folder: &Path,
        (number, offset): (u64, u64),
        tail: u64,
        crc: u32,
    ) -> Result<Option<Self>, StateError> {
        let path = journal_path(folder, number);
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(at(&path, "open")(error)),
        };
        let length = file.metadata().map_err(at(&path, "examine"))?.len();
        if offset > length || tail_crc(&file, &path, offset, tail)? != crc {
            return Ok(None);
        }
        let journal = Some((number, file));
        let (folder, variables) = (folder.into(), Vec::new());
        Ok(Some(Self { folder, shared: None, variables, first_journal: number, journal, piece: PIECE }))
    }

    /// Id and bytes of each file.
    pub fn variables(&self) -> &[(u32, u64)] {
        &self.variables
    }

    pub fn first_journal(&self) -> u64 {
        self.first_journal
    }

    /// A part of a variable's file. Empty: it has no more, or there is no such file.
    pub fn read_variable(&self, id: u32, offset: u64) -> Result<Vec<u8>, StateError> {
        let known = self.variables.iter().find(|known| known.0 == id && self.shared.is_some());
        let Some((_, bytes)) = known else { return Ok(Vec::new()) };
        let path = variable_path(&self.folder, id);
        let file = File::open(&path).map_err(at(&path, "open"))?;
        self.read(&file, &path, offset, *bytes)
    }

    /// A part of a journal whose commits end at `end`. None: it was merged, and is gone.
    pub fn read_journal(&mut self, number: u64, offset: u64, end: u64) -> Result<Option<Vec<u8>>, StateError> {
        self.shared = None;
        let path = journal_path(&self.folder, number);
        if self.journal.as_ref().is_none_or(|journal| journal.0 != number) {
            self.journal = match File::open(&path) {
                Ok(file) => Some((number, file)),
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
                Err(error) => return Err(at(&path, "open")(error)),
            };
        }
        self.journal.as_ref().map(|(_, file)| self.read(file, &path, offset, end)).transpose()
    }

    fn read(&self, file: &File, path: &Path, offset: u64, end: u64) -> Result<Vec<u8>, StateError> {
        let mut piece = vec![0; size(1, end.saturating_sub(offset).min(self.piece))];
        file.read_exact_at(&mut piece, offset).map_err(at(path, "read"))?;
        Ok(piece)
    }

    /// For tests: how much a reader gets at once.
    #[doc(hidden)]
    pub fn set_piece(&mut self, bytes: u64) {
        self.piece = bytes;
    }
}

/// What the mark of a copy says once it has everything that its owner had written: it may be taken up again, and
/// promoted.
const COMPLETE: &str = "a complete copy\n";

/// Where the state was before, if a copy was promoted without a process.
const PROMOTED: &str = "promoted";

fn is_complete(folder: &Path) -> bool {
    fs::read_to_string(folder.join(COPY)).is_ok_and(|text| text == COMPLETE)
}

/// The copy on its way to become the state.
pub struct Replica {
    folder: PathBuf,
    task: String,
    newest: Option<Journal>,
    /// The journal before, as long as the newest one has not begun.
    old: Option<Journal>,
    merging: Option<JoinHandle<Result<(), StateError>>>,
    _lock: File,
}

impl Replica {
    /// Whether the folder has a state that was taken over from this address. If it has another one, that is an error.
    /// Another process may have the folder: nothing is changed.
    pub fn has_taken_over(folder: &Path, from: &str) -> Result<bool, StateError> {
        if !folder.exists() || is_marked(folder, COPY) || is_marked(folder, MOVED) || journals(folder)?.is_empty() {
            return Ok(false);
        }
        let path = folder.join(FROM);
        match fs::read_to_string(&path) {
            Ok(origin) if origin == from || origin == PROMOTED => Ok(true),
            Err(error) if error.kind() != ErrorKind::NotFound => Err(at(&path, "read")(error)),
            _ => Err(StateError::Taken { folder: folder.into() }),
        }
    }

    /// Of which state the folder has a complete copy, if it has one.
    pub fn complete_copy(folder: &Path) -> Result<Option<u64>, StateError> {
        if is_complete(folder) { origin_of(folder).map(|(_, state)| Some(state)) } else { Ok(None) }
    }

    /// Begins anew. What is left of another copy, or of a state that has moved, is removed.
    pub fn begin(folder: &Path, task: &str) -> Result<Self, StateError> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder).map_err(at(folder, "create the folder"))?;
        let lock = lock(folder)?;
        let is_state = !is_marked(folder, COPY) && !is_marked(folder, MOVED);
        if is_state && !Files::list(folder, task)?.journals.is_empty() {
            return Err(StateError::Taken { folder: folder.into() });
        }
        mark(folder, COPY, &format!("a copy of the state of {task}, which has not taken over\n"))?;
        let all = Files::unmarked(folder, task)?;
        let old = all.journals.iter().map(|number| journal_path(folder, *number));
        let old = old.chain(all.variables.iter().map(|id| variable_path(folder, *id)));
        let marks = [MOVED, PROMOTE, FROM].map(|mark| folder.join(mark));
        for path in old.chain(marks).filter(|path| path.exists()) {
            fs::remove_file(&path).map_err(at(&path, "remove the file"))?;
        }
        let (folder, task) = (folder.into(), task.into());
        Ok(Self { folder, task, newest: None, old: None, merging: None, _lock: lock })
    }

    /// Takes up a complete copy that another process has left. None: there is none.
    pub fn reopen(folder: &Path, task: &str) -> Result<Option<Self>, StateError> {
        if !is_complete(folder) {
            return Ok(None);
        }
        let lock = lock(folder)?;
        let mut journals = Files::unmarked(folder, task)?.journals;
        let Some(mut number) = journals.pop() else { return Ok(None) };
        let path = journal_path(folder, number);
        let file = File::open(&path).map_err(at(&path, "open"))?;
        let length = file.metadata().map_err(at(&path, "examine"))?.len();
        if !has_begun(&file, &path, length)? {
            fs::remove_file(&path).map_err(at(&path, "remove the file"))?;
            let Some(before) = journals.pop() else { return Ok(None) };
            number = before;
        }
        for number in journals {
            let journal = Journal::recover(folder, number, task)?;
            remove(folder, &journal, &merge(folder, task, &journal, true)?)?;
        }
        let newest = Some(Journal::recover(folder, number, task)?);
        Ok(Some(Self { folder: folder.into(), task: task.into(), newest, old: None, merging: None, _lock: lock }))
    }

    /// The copy has everything that its owner has written, and stays complete from here on.
    pub fn complete(&mut self) -> Result<(), StateError> {
        self.prepare()?;
        mark(&self.folder, COPY, COMPLETE)
    }

    pub fn write_variable(&self, id: u32, offset: u64, piece: &[u8]) -> Result<(), StateError> {
        let path = variable_path(&self.folder, id);
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(&path).map_err(at(&path, "create"))?;
        file.write_all_at(piece, offset).map_err(at(&path, "write"))
    }

    /// What follows in a journal, or the beginning of the next one.
    pub fn write_journal(&mut self, number: u64, piece: &[u8]) -> Result<(), StateError> {
        if let Some(old) = self.newest.take_if(|newest| newest.number != number) {
            old.file.sync_data().map_err(at(&old.path, "synchronise"))?;
            self.old = Some(old);
        }
        if self.newest.is_none() {
            let path = journal_path(&self.folder, number);
            let mut options = OpenOptions::new();
            let options = options.read(true).write(true).create(true).truncate(true);
            let file = options.open(&path).map_err(at(&path, "create"))?;
            self.newest = Some(Journal { path, file, number, start: 0, end: 0 });
            sync(&self.folder)?;
        }
        let Some(Journal { path, file, end, .. }) = &mut self.newest else { return Ok(()) };
        file.write_all_at(piece, *end).map_err(at(path, "write"))?;
        *end += piece.len() as u64;
        // Without the beginning of the next one, nobody could open the folder.
        if self.old.is_some() && has_begun(file, path, *end)? {
            file.sync_data().map_err(at(path, "synchronise"))?;
            return self.old.take().map_or(Ok(()), |old| self.merge(old));
        }
        Ok(())
    }

    fn merge(&mut self, journal: Journal) -> Result<(), StateError> {
        self.end_merge()?;
        let (folder, task) = (self.folder.clone(), self.task.clone());
        let run = move || remove(&folder, &journal, &merge(&folder, &task, &journal, true)?);
        let thread = std::thread::Builder::new().name("starwire-merge".into()).spawn(run);
        self.merging = Some(thread.map_err(at(&self.folder, "merge a journal"))?);
        Ok(())
    }

    fn end_merge(&mut self) -> Result<(), StateError> {
        let merged = self.merging.take().map(JoinHandle::join);
        merged.map_or(Ok(()), |merged| merged.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }

    /// The newest journal, if the files of the variables have all that is in the others: `Loaded::read` needs that.
    pub fn only_journal(&self) -> Option<u64> {
        let is_merged = self.old.is_none() && self.merging.as_ref().is_none_or(JoinHandle::is_finished);
        self.newest.as_ref().filter(|_| is_merged).map(|newest| newest.number)
    }

    /// Where the newest journal ends.
    pub fn position(&self) -> (u64, u64) {
        self.newest.as_ref().map_or((0, 0), |newest| (newest.number, newest.end))
    }

    /// The checksum of the last `tail` bytes before that.
    pub fn tail_crc(&self, tail: u64) -> Result<u32, StateError> {
        self.newest.as_ref().map_or(Ok(0), |Journal { path, file, end, .. }| tail_crc(file, path, *end, tail))
    }

    /// What is there will be there after a loss of power.
    pub fn sync(&self) -> Result<(), StateError> {
        let Some(Journal { path, file, .. }) = &self.newest else { return Ok(()) };
        file.sync_data().map_err(at(path, "synchronise"))
    }

    /// Whether somebody has said that the owner has ended ([`promote`]).
    pub fn is_promoted(&self) -> bool {
        self.folder.join(PROMOTE).exists()
    }

    /// Somebody has promoted the copy although its owner lives.
    pub fn stay(&self) -> Result<(), StateError> {
        let path = self.folder.join(PROMOTE);
        fs::remove_file(&path).map_err(at(&path, "remove the file"))
    }

    /// Makes sure that everything is on the disk: the owner may hand over.
    pub fn prepare(&mut self) -> Result<(), StateError> {
        self.end_merge()?;
        let all = Files::unmarked(&self.folder, &self.task)?;
        let journals = all.journals.iter().map(|number| journal_path(&self.folder, *number));
        for path in journals.chain(all.variables.iter().map(|id| variable_path(&self.folder, *id))) {
            File::open(&path).and_then(|file| file.sync_all()).map_err(at(&path, "synchronise"))?;
        }
        sync(&self.folder)
    }

    /// From here on, the folder has the state, which was that of the server at this address.
    pub fn take_over(mut self, from: &str) -> Result<(), StateError> {
        self.end_merge()?;
        if let Some(Journal { path, .. }) = self.newest.take_if(|_| self.old.is_some()) {
            fs::remove_file(&path).map_err(at(&path, "remove the file"))?;
        }
        mark(&self.folder, FROM, from)?;
        fail_point!("a copy has its origin, and is still marked as a copy");
        unmark(&self.folder)
    }
}

fn tail_crc(file: &File, path: &Path, end: u64, tail: u64) -> Result<u32, StateError> {
    let mut bytes = vec![0; size(1, tail.min(end))];
    file.read_exact_at(&mut bytes, end - tail.min(end)).map_err(at(path, "read"))?;
    Ok(crc32c::crc32c(&bytes))
}

/// What tells a state from another one of the same task: each begins with devices of its own.
pub fn state_of(incarnations: &[u64]) -> u64 {
    incarnations.first().copied().unwrap_or_default()
}

/// The task, and which of its states it is, as the oldest journal says.
fn origin_of(folder: &Path) -> Result<(String, u64), StateError> {
    let mut origin = (String::new(), 0);
    for (_, path) in journals(folder)?.into_iter().take(1) {
        let file = File::open(&path).map_err(at(&path, "open"))?;
        let length = file.metadata().map_err(at(&path, "examine"))?.len();
        each(&file, &path, 0, length, |_, record| {
            if let Record::Header { task, incarnations } = record {
                origin = (task.to_owned(), state_of(&incarnations));
            }
            Ok(())
        })?;
    }
    Ok(origin)
}

/// Whether a journal has all that it begins with.
fn has_begun(file: &File, path: &Path, length: u64) -> Result<bool, StateError> {
    let mut has_begun = false;
    each(file, path, 0, length, |_, record| {
        has_begun |= matches!(record, Record::Commit { .. });
        Ok(())
    })?;
    Ok(has_begun)
}

impl Drop for Replica {
    /// Another one may use the folder once this has ended.
    fn drop(&mut self) {
        let _ = self.merging.take().map(JoinHandle::join);
    }
}

/// Makes a copy the state: the owner has ended, and will not come back. A process that keeps the copy takes over by
/// itself; false: there is none.
pub fn promote(folder: &Path) -> Result<bool, StateError> {
    if let Some(uid) = owner_beside_root(folder)? {
        return Err(StateError::OtherUser { folder: folder.into(), uid });
    }
    if !is_complete(folder) {
        return Err(StateError::NoCopy { folder: folder.into() });
    }
    let (task, _) = origin_of(folder)?;
    match Replica::reopen(folder, &task) {
        Ok(None) => Err(StateError::NoCopy { folder: folder.into() }),
        Ok(Some(alone)) => alone.take_over(PROMOTED).map(|()| false),
        Err(StateError::InUse { .. }) => {
            let path = folder.join(PROMOTE);
            File::create(&path).map_err(at(&path, "create"))?;
            Ok(true)
        }
        Err(error) => Err(error),
    }
}

fn unmark(folder: &Path) -> Result<(), StateError> {
    for mark in [COPY, PROMOTE] {
        match fs::remove_file(folder.join(mark)) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(at(folder, "remove a mark")(error)),
            _ => {}
        }
    }
    sync(folder)
}

fn sync(folder: &Path) -> Result<(), StateError> {
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(at(folder, "synchronise"))
}

/// The state belongs to the task at this address from now on. The folder stays locked by whoever calls this.
pub(crate) fn mark_moved(folder: &Path, to: &str) -> Result<(), StateError> {
    mark(folder, MOVED, to)
}

/// The folder has the mark from here on, or, after an error, has not.
fn mark(folder: &Path, name: &str, text: &str) -> Result<(), StateError> {
    let (path, new) = (folder.join(name), folder.join(name).with_extension(NEW));
    let write = |mut file: File| file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
    let written = File::create(&new).and_then(write).map_err(at(&new, "write"));
    fail_point!("a mark is written, and has no name");
    let marked = written.and_then(|()| fs::rename(&new, &path).map_err(at(&new, "rename")));
    marked.and_then(|()| sync(folder)).inspect_err(|_| {
        let _ = fs::remove_file(&new);
        // COPY was there before, and stays.
        if name != COPY {
            let _ = fs::remove_file(&path);
        }
    })
}
