//! The folder: recovery, flushes, and when a journal ends.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::copy::mark_moved;
use crate::error::{StateError, at};
use crate::files::{Files, variable_path};
use crate::journal::{Beginning, Journal};
use crate::loaded::{Content, Loaded};
use crate::lock::{exclude_readers, lock};
use crate::merge::{self, Merged, merge, remove};
use crate::record::{Definition, FULL, Record};
use crate::variable::Variable;
use starwire_marks::fail_point;

/// A journal may always grow to this length.
const SHORT_JOURNAL: u64 = 256 << 20;

/// A server that starts waits for so long until nobody reads its files.
const READERS: Duration = Duration::from_secs(60);

pub struct Store {
    folder: PathBuf,
    task: String,
    incarnations: Vec<u64>,
    variables: BTreeMap<u32, Variable>,
    /// Variables that are new, or gone, since the last commit. A flush that fails leaves them to the next one.
    new: BTreeMap<u32, Definition>,
    lost: BTreeSet<u32>,
    next_id: u32,
    calls: Vec<u8>,
    flush: u64,
    time: u64,
    journal: Journal,
    /// The journal before, until the files of the variables have what is in it, and the thread that writes that.
    old: Option<Arc<Journal>>,
    merging: Option<JoinHandle<Result<(), StateError>>>,
    merges: Merges,
    /// Rows that were read before this process had the state.
    loaded: Mutex<BTreeMap<u32, Content>>,
    /// Somebody wants a new journal, whatever the length of this one.
    is_asked: bool,
    short_journal: u64,
    _lock: File,
}

/// When an old journal goes to the files of the variables.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Merges {
    /// In a thread, while the new one grows.
    Beside,
    AtOnce,
    Never,
}

/// What a flush has written.
#[derive(Debug, PartialEq, Eq)]
pub struct Committed {
    pub bytes: u64,
}

impl Store {
    /// Opens the state of this task, or begins one. `incarnations` are those of the task's devices; what is restored
    /// keeps those that it had.
    pub fn open(folder: &Path, task: &str, incarnations: &[u64]) -> Result<Self, StateError> {
        // What is in it is nobody else's business.
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder).map_err(at(folder, "create the folder"))?;
        let lock = lock(folder)?;
        let Files { journals, variables } = Files::list(folder, task)?;
        let Some((number, older)) = journals.split_last() else {
            if let Some(id) = variables.first() {
                return Err(StateError::Foreign { path: variable_path(folder, *id), task: task.into() });
            }
            let time = now();
            let beginning = Beginning { task, incarnations, variables: &BTreeMap::new(), calls: &[], flush: 0, time };
            let journal = Journal::begin(folder, 1, &beginning)?;
            let merged = merge(folder, task, &journal, true)?;
            return Ok(Self::new(folder, task, journal, merged, lock));
        };
        let journal = Journal::recover(folder, *number, task)?;
        let _alone = wait_for_readers(folder)?;
        for number in older {
            let journal = Journal::recover(folder, *number, task)?;
            remove(folder, &journal, &merge(folder, task, &journal, true)?)?;
        }
        let (merged, rows) = merge::read(folder, task, &journal, true)?;
        // What is in memory is not read from the files: they may lack what is in the journal, as they do later.
        let loaded = Loaded::of(folder, &journal)?.filter(|loaded| loaded.has(&merged.variables));
        if loaded.is_none() {
            merge::write(&merged, rows, &journal)?;
        }
        for id in variables.iter().filter(|id| !merged.variables.contains_key(id)) {
            let path = variable_path(folder, *id);
            if !merged.gone.contains(&path) && path.exists() {
                fs::remove_file(&path).map_err(at(&path, "remove the file"))?;
            }
        }
        let mut store = Self::new(folder, task, journal, merged, lock);
        store.loaded = Mutex::new(loaded.map(Loaded::into_contents).unwrap_or_default());
        Ok(store)
    }

    fn new(folder: &Path, task: &str, journal: Journal, merged: Merged, lock: File) -> Self {
        let Merged { incarnations, variables, next_id, calls, flush, time, .. } = merged;
        Self {
            folder: folder.into(),
            task: task.into(),
            incarnations,
            variables,
            new: BTreeMap::new(),
            lost: BTreeSet::new(),
            next_id,
            calls,
            flush,
            time,
            journal,
            old: None,
            merging: None,
            merges: Merges::Beside,
            loaded: Mutex::default(),
            is_asked: false,
            short_journal: SHORT_JOURNAL,
            _lock: lock,
        }
    }

    pub fn incarnations(&self) -> &[u64] {
        &self.incarnations
    }

    pub fn variables(&self) -> impl Iterator<Item = (u32, &Definition)> {
        self.variables.iter().map(|(id, variable)| (*id, &variable.definition))
    }

    /// Reads all rows of a variable, unless they were taken.
    pub fn read(&self, id: u32, content: &mut [u8]) -> Result<(), StateError> {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(rows) = loaded.get(&id).map(Content::bytes).filter(|rows| rows.len() == content.len()) {
            content.copy_from_slice(rows);
            return Ok(());
        }
        let Some(Variable { path, file, .. }) = self.variables.get(&id) else { return Ok(()) };
        file.read_exact_at(content, 0).map_err(at(path, "read"))
    }

    /// All rows of a variable that were read before this process had the state; once. None: [`Store::read`] reads them.
    pub fn take(&self, id: u32) -> Option<Content> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner).remove(&id)
    }

    /// How many bytes can be taken.
    pub fn loaded(&self) -> usize {
        let loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        loaded.values().map(|content| content.bytes().len()).sum()
    }

    /// The calls that were applied, as their owner wrote them.
    pub fn calls(&self) -> &[u8] {
        &self.calls
    }

    /// The number of the last flush; 0: there was none. And when it began, in milliseconds of Unix time: what had
    /// changed by then is there.
    pub fn last_flush(&self) -> (u64, u64) {
        (self.flush, self.time)
    }

    pub fn bytes(&self) -> u64 {
        self.variables.values().filter_map(|variable| variable.definition.size()).sum()
    }

    /// Begins a flush. What one wrote that was not committed is dropped.
    pub fn begin(&mut self) -> Result<Flush<'_>, StateError> {
        self.check_journal()?;
        self.change_journals()?;
        let Journal { path, file, end, .. } = &self.journal;
        file.set_len(*end).map_err(at(path, "shorten"))?;
        let at = *end;
        let mut flush = Flush { store: self, time: now(), at, buffer: Vec::new(), rows: None, failed: None };
        for (id, definition) in flush.store.new.clone() {
            flush.write(&Record::Variable { id, definition });
        }
        for id in flush.store.lost.clone() {
            flush.write(&Record::Gone { id });
        }
        Ok(flush)
    }

    /// Whoever removes the folder takes away all that is written.
    fn check_journal(&self) -> Result<(), StateError> {
        let Journal { path, file, .. } = &self.journal;
        match file.metadata().map_err(at(path, "look at"))?.nlink() {
            0 => Err(at(path, "write")(io::Error::new(io::ErrorKind::NotFound, "the file was removed"))),
            _ => Ok(()),
        }
    }

    /// Begins a new journal if this one is long, and sees to it that the old one goes to the files of the variables.
    fn change_journals(&mut self) -> Result<(), StateError> {
        let length = self.journal.end - self.journal.start;
        let is_long = length > self.bytes().max(self.short_journal) || (self.is_asked && length > 0);
        let waits = is_long || self.merges == Merges::AtOnce;
        self.end_merge(|thread| waits || thread.is_finished())?;
        // A flush that has failed may have left variables to the next one, which then are in no list yet.
        let may_begin = is_long && self.new.is_empty() && self.lost.is_empty();
        if self.merging.is_some() || (self.old.is_none() && !may_begin) {
            return Ok(());
        }
        // While somebody reads, the journal grows.
        let Some(alone) = exclude_readers(&self.folder)? else { return Ok(()) };
        let Self { folder, task, incarnations, variables, calls, flush, time, journal, old, .. } = self;
        if old.is_none() {
            let beginning = Beginning { task, incarnations, variables, calls, flush: *flush, time: *time };
            let new = Journal::begin(folder, journal.number + 1, &beginning)?;
            fail_point!("a new journal begins, and the old one is not merged");
            self.is_asked = false;
            *old = Some(Arc::new(std::mem::replace(journal, new)));
        }
        let Some(old) = old.clone().filter(|_| self.merges != Merges::Never) else { return Ok(()) };
        let (folder, task) = (self.folder.clone(), self.task.clone());
        let run = move || {
            let _alone = alone;
            remove(&folder, &old, &merge(&folder, &task, &old, false)?)
        };
        let thread = std::thread::Builder::new().name("starwire-merge".into()).spawn(run);
        self.merging = Some(thread.map_err(at(&self.folder, "merge a journal"))?);
        let is_at_once = self.merges == Merges::AtOnce;
        self.end_merge(|_| is_at_once)
    }

    fn end_merge(
        &mut self,
        is_due: impl FnOnce(&JoinHandle<Result<(), StateError>>) -> bool,
    ) -> Result<(), StateError> {
        if let Some(thread) = self.merging.take_if(|thread| is_due(thread)) {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic))?;
            self.old = None;
        }
        Ok(())
    }

    /// The next flush goes to a new journal, if that can be: whoever opens the state has less to merge.
    pub fn ask_for_journal(&mut self) {
        self.is_asked = true;
    }

    /// The number of each journal, and where its commits end.
    pub fn journals(&self) -> impl Iterator<Item = (u64, u64)> {
        self.old.iter().map(|old| (old.number, old.end)).chain([(self.journal.number, self.journal.end)])
    }

    /// The state belongs to the task at this address from now on: nobody opens this folder again.
    pub fn hand_over(&mut self, to: &str) -> Result<(), StateError> {
        mark_moved(&self.folder, to)
    }

    /// For tests: how long a journal gets, and what happens then.
    #[doc(hidden)]
    pub fn set_journals(&mut self, bytes: u64, merges: Merges) {
        (self.short_journal, self.merges) = (bytes, merges);
    }
}

impl Drop for Store {
    /// Another process may use the folder once this has ended.
    fn drop(&mut self) {
        if let Some(thread) = self.merging.take() {
            let _ = thread.join();
        }
    }
}

/// Changes on their way into the journal. They count once they are committed.
pub struct Flush<'a> {
    store: &'a mut Store,
    /// When it began.
    time: u64,
    /// Where the next record goes.
    at: u64,
    buffer: Vec<u8>,
    rows: Option<Collected>,
    /// The first error; what comes after it is dropped.
    failed: Option<StateError>,
}

/// Rows that are collected for one record.
struct Collected {
    id: u32,
    row_bytes: usize,
    runs: Vec<(u64, u64)>,
    content: Vec<u8>,
}

impl Flush<'_> {
    /// A variable that the state does not have yet, or not with this type and shape. All of its rows must follow.
    pub fn variable(&mut self, definition: Definition) -> u32 {
        self.end_rows();
        let id = self.store.next_id;
        self.store.next_id = id.saturating_add(1);
        self.write(&Record::Variable { id, definition: definition.clone() });
        self.store.new.insert(id, definition);
        id
    }

    /// Rows `first`, `first + 1` … of a variable. `content` has whole rows.
    pub fn rows(&mut self, id: u32, first: u64, content: &[u8]) {
        if self.rows.as_ref().is_none_or(|rows| rows.id != id) {
            self.end_rows();
            let known = self.store.variables.get(&id).map(|variable| &variable.definition);
            let row_bytes = self.store.new.get(&id).or(known).map_or(0, |definition| definition.row_bytes);
            let Some(row_bytes) = usize::try_from(row_bytes).ok().filter(|bytes| *bytes > 0) else { return };
            self.rows = Some(Collected { id, row_bytes, runs: Vec::new(), content: Vec::new() });
        }
        let row_bytes = self.rows.as_ref().map_or(1, |rows| rows.row_bytes);
        let mut first = first;
        for content in content.chunks((FULL / row_bytes).max(1).saturating_mul(row_bytes)) {
            // In a record, each row is there once.
            let is_before = |rows: &Collected| rows.runs.last().is_some_and(|(start, length)| first < start + length);
            if self.rows.as_ref().is_some_and(|rows| is_before(rows) || rows.content.len() + content.len() > FULL) {
                self.write_rows();
            }
            let Some(rows) = &mut self.rows else { return };
            let count = (content.len() / row_bytes) as u64;
            match rows.runs.last_mut() {
                Some((start, length)) if *start + *length == first => *length += count,
                _ => rows.runs.push((first, count)),
            }
            rows.content.extend_from_slice(content);
            first += count;
        }
    }

    /// The variable does not exist any more.
    pub fn gone(&mut self, id: u32) {
        self.end_rows();
        self.write(&Record::Gone { id });
        self.store.new.remove(&id);
        self.store.lost.insert(id);
    }

    /// Whether nothing has changed.
    pub fn is_empty(&self) -> bool {
        self.at == self.store.journal.end && self.rows.is_none() && self.failed.is_none()
    }

    /// Makes the changes count, with the calls that have made them.
    pub fn commit(mut self, calls: &[u8]) -> Result<Committed, StateError> {
        self.end_rows();
        if calls != self.store.calls {
            self.write(&Record::Calls(calls));
        }
        fail_point!("changes are written, and are not committed");
        let (flush, time) = (self.store.flush + 1, self.time);
        self.write(&Record::Commit { flush, time });
        if let Some(error) = self.failed {
            return Err(error);
        }
        let Self { store, at: end, .. } = self;
        let Journal { path, file, .. } = &store.journal;
        fail_point!("a commit is written, and is not on the disk");
        file.sync_data().map_err(at(path, "synchronise"))?;
        store.check_journal()?;
        let bytes = end - std::mem::replace(&mut store.journal.end, end);
        (store.flush, store.time, store.calls) = (flush, time, calls.to_vec());
        while let Some((id, definition)) = store.new.first_key_value() {
            let (id, variable) = (*id, Variable::open(&store.folder, *id, definition.clone(), false)?);
            store.variables.insert(id, variable);
            store.new.remove(&id);
        }
        for id in std::mem::take(&mut store.lost) {
            store.variables.remove(&id);
        }
        Ok(Committed { bytes })
    }

    fn end_rows(&mut self) {
        self.write_rows();
        self.rows = None;
    }

    fn write_rows(&mut self) {
        let Some(rows) = self.rows.take_if(|rows| !rows.runs.is_empty()) else { return };
        let Collected { id, row_bytes, mut runs, mut content } = rows;
        let all = std::mem::take(&mut runs);
        self.write(&Record::Rows { id, runs: all, content: &content });
        content.clear();
        self.rows = Some(Collected { id, row_bytes, runs, content });
    }

    fn write(&mut self, record: &Record<'_>) {
        if self.failed.is_some() {
            return;
        }
        self.buffer.clear();
        record.write(&mut self.buffer);
        let Journal { path, file, .. } = &self.store.journal;
        match file.write_all_at(&self.buffer, self.at).map_err(at(path, "write")) {
            Ok(()) => self.at += self.buffer.len() as u64,
            Err(error) => self.failed = Some(error),
        }
    }
}

/// For a short time: whoever reads copies files.
fn wait_for_readers(folder: &Path) -> Result<File, StateError> {
    let until = Instant::now() + READERS;
    loop {
        match exclude_readers(folder)? {
            Some(alone) => return Ok(alone),
            None if Instant::now() > until => return Err(StateError::Read { folder: folder.into() }),
            None => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// Milliseconds of Unix time.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
