//! The folder: recovery, flushes, journals.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::ops::Range;
use std::os::unix::fs::{DirBuilderExt, FileExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::error::{StateError, at};
use crate::lock::{LOCK, exclude_readers, lock};
use crate::record::{self, Definition, FULL, HEAD, LONGEST, Record, Unreadable};

/// A journal may always grow to this length.
const SHORT_JOURNAL: u64 = 256 << 20;

/// A server that starts waits for so long until nobody reads its files.
const READERS: Duration = Duration::from_secs(60);

struct Variable {
    definition: Definition,
    path: PathBuf,
    file: File,
}

struct Journal {
    path: PathBuf,
    file: File,
    number: u64,
    /// The length of what it began with.
    start: u64,
    /// Where its last commit ends.
    end: u64,
}

pub struct Store {
    folder: PathBuf,
    task: String,
    incarnations: Vec<u64>,
    variables: BTreeMap<u32, Variable>,
    /// Files of variables that no longer exist, but with which the journal begins.
    gone: Vec<PathBuf>,
    /// Variables that are new, or gone, since the last commit. A flush that fails leaves them to the next one.
    new: BTreeMap<u32, Definition>,
    lost: BTreeSet<u32>,
    next_id: u32,
    calls: Vec<u8>,
    flush: u64,
    time: u64,
    journal: Journal,
    short_journal: u64,
    _lock: File,
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
        let Some(number) = journals.last() else {
            if let Some(id) = variables.first() {
                return Err(StateError::Foreign { path: variable_path(folder, *id), task: task.into() });
            }
            let time = now();
            let beginning = Beginning { task, incarnations, variables: &BTreeMap::new(), calls: &[], flush: 0, time };
            let journal = Journal::begin(folder, 1, &beginning)?;
            return Ok(Self::new(folder, task, incarnations.to_vec(), journal, lock));
        };
        let journal = Journal::recover(folder, *number, task)?;
        let mut store = Self::new(folder, task, Vec::new(), journal, lock);
        let _alone = wait_for_readers(folder)?;
        store.apply(true)?;
        for number in &journals[..journals.len() - 1] {
            let path = journal_path(folder, *number);
            fs::remove_file(&path).map_err(at(&path, "remove the file"))?;
        }
        for id in variables.iter().filter(|id| !store.variables.contains_key(id)) {
            let path = variable_path(folder, *id);
            if !store.gone.contains(&path) {
                fs::remove_file(&path).map_err(at(&path, "remove the file"))?;
            }
        }
        Ok(store)
    }

    fn new(folder: &Path, task: &str, incarnations: Vec<u64>, journal: Journal, lock: File) -> Self {
        Self {
            folder: folder.into(),
            task: task.into(),
            incarnations,
            variables: BTreeMap::new(),
            gone: Vec::new(),
            new: BTreeMap::new(),
            lost: BTreeSet::new(),
            next_id: 1,
            calls: Vec::new(),
            flush: 0,
            time: 0,
            journal,
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

    /// Reads all rows of a variable.
    pub fn read(&self, id: u32, content: &mut [u8]) -> Result<(), StateError> {
        let Some(Variable { path, file, .. }) = self.variables.get(&id) else { return Ok(()) };
        file.read_exact_at(content, 0).map_err(at(path, "read"))
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
        let Journal { start, end, .. } = self.journal;
        if end - start > self.bytes().max(self.short_journal) {
            self.change_journals()?;
        }
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

    /// What is committed in the journal goes to the files of the variables. `recovers`: they must be there already, if
    /// the journal began with them.
    fn apply(&mut self, recovers: bool) -> Result<(), StateError> {
        let Self { folder, task, incarnations, variables, gone, next_id, calls, flush, time, journal, .. } = self;
        let Journal { path, file, end, .. } = journal;
        let (mut must_exist, mut rows) = (recovers, Vec::new());
        // The journal has all of them.
        variables.clear();
        gone.clear();
        each(file, path, 0, *end, |(position, _), record| {
            match record {
                Record::Header { task: found, .. } if found != task => {
                    return Err(StateError::OtherTask { path: path.clone(), found: found.into(), task: task.clone() });
                }
                Record::Header { incarnations: found, .. } => *incarnations = found,
                Record::Variable { id, definition } => {
                    *next_id = id.saturating_add(1).max(*next_id);
                    variables.insert(id, Variable::open(folder, id, definition, must_exist)?);
                }
                Record::Rows { id, .. } => rows.push((id, position)),
                Record::Gone { id } => gone.extend(variables.remove(&id).map(|variable| variable.path)),
                Record::Calls(found) => *calls = found.to_vec(),
                Record::Commit { flush: number, time: then } => {
                    (*flush, *time) = (number, then);
                    must_exist = false;
                }
            }
            Ok(())
        })?;
        // Each row once: the last one counts.
        let mut written: BTreeMap<u32, Rows> = BTreeMap::new();
        for (id, position) in rows.into_iter().rev() {
            let Some(variable) = variables.get(&id) else { continue };
            let written = written.entry(id).or_insert_with(|| Rows::none_of(variable.definition.rows));
            let next = after(file, path, position, *end)?.unwrap_or(position);
            each(file, path, position, next, |_, record| {
                let Record::Rows { runs, content, .. } = record else { return Ok(()) };
                let why = || "it has rows that the variable does not have".into();
                let wrong = || StateError::Damaged { path: path.clone(), at: position, why: why() };
                variable.write(&runs, content, written)?.ok_or_else(wrong)
            })?;
        }
        Ok(())
    }

    fn change_journals(&mut self) -> Result<(), StateError> {
        // While somebody reads, the journal grows.
        let Some(_alone) = exclude_readers(&self.folder)? else { return Ok(()) };
        self.apply(false)?;
        for Variable { path, file, .. } in self.variables.values() {
            file.sync_data().map_err(at(path, "synchronise"))?;
        }
        let Self { folder, task, incarnations, variables, calls, flush, time, journal, .. } = self;
        let beginning = Beginning { task, incarnations, variables, calls, flush: *flush, time: *time };
        let new = Journal::begin(folder, journal.number + 1, &beginning)?;
        let old = std::mem::replace(journal, new);
        let gone = std::mem::take(&mut self.gone);
        let remove = |path: &PathBuf| fs::remove_file(path).map_err(at(path, "remove the file"));
        [old.path].iter().chain(&gone).try_for_each(remove)
    }

    /// Journals end early, for tests.
    #[doc(hidden)]
    pub fn limit_journal(&mut self, bytes: u64) {
        self.short_journal = bytes;
    }
}

impl Variable {
    fn open(folder: &Path, id: u32, definition: Definition, must_exist: bool) -> Result<Self, StateError> {
        let path = variable_path(folder, id);
        // `Record::read` has checked it.
        let expected = definition.size().unwrap_or_default();
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(!must_exist).open(&path).map_err(at(&path, "open"))?;
        let bytes = file.metadata().map_err(at(&path, "examine"))?.len();
        if must_exist && bytes != expected {
            return Err(StateError::Length { path, bytes, expected });
        }
        file.set_len(expected).map_err(at(&path, "lengthen"))?;
        Ok(Self { definition, path, file })
    }

    /// Writes those rows that were not written yet. None: they are not all rows of this variable.
    fn write(&self, runs: &[(u64, u64)], content: &[u8], written: &mut Rows) -> Result<Option<()>, StateError> {
        let Definition { rows, row_bytes, .. } = self.definition;
        let mut window = Window { variable: self, first: 0, patches: Vec::new(), content };
        let mut from = 0;
        for (first, count) in runs {
            if first.checked_add(*count).is_none_or(|end| end > rows) {
                return Ok(None);
            }
            let Some(part) = record::part(from, *count, row_bytes, content) else { return Ok(None) };
            from += part.len() as u64;
            let mut row = *first;
            while row < first + count {
                let is_old = written.has(row);
                let same = (row..first + count).take_while(|row| written.has(*row) == is_old).count() as u64;
                if !is_old {
                    (row..row + same).for_each(|row| written.add(row));
                    let start = part.start + record::size(row - first, row_bytes);
                    window.add(row * row_bytes, start..start + record::size(same, row_bytes))?;
                }
                row += same;
            }
        }
        window.write()?;
        Ok(Some(()))
    }
}

/// Some rows of a variable, a bit for each.
struct Rows(Vec<u64>);

impl Rows {
    fn none_of(rows: u64) -> Self {
        // As many words as memory allows: the rows are in a file of this machine.
        Self(vec![0; usize::try_from(rows.div_ceil(64)).unwrap_or(usize::MAX)])
    }

    fn place(row: u64) -> (usize, u64) {
        (usize::try_from(row / 64).unwrap_or(usize::MAX), 1 << (row % 64))
    }

    fn has(&self, row: u64) -> bool {
        let (word, bit) = Self::place(row);
        self.0.get(word).is_some_and(|word| word & bit != 0)
    }

    fn add(&mut self, row: u64) {
        let (word, bit) = Self::place(row);
        self.0[word] |= bit;
    }
}

/// Rows that lie close to each other in the file. If they are dense, all between the first and the last is read and
/// written at once.
struct Window<'a> {
    variable: &'a Variable,
    first: u64,
    /// Places in the file, and in the content.
    patches: Vec<(u64, Range<usize>)>,
    content: &'a [u8],
}

impl Window<'_> {
    const LONGEST: u64 = 1 << 20;
    /// A row in each page.
    const DENSE: u64 = 4096;

    fn add(&mut self, place: u64, part: Range<usize>) -> Result<(), StateError> {
        if self.patches.is_empty() || place + part.len() as u64 > self.first + Self::LONGEST {
            self.write()?;
            self.first = place;
        }
        self.patches.push((place, part));
        Ok(())
    }

    fn write(&mut self) -> Result<(), StateError> {
        let Variable { file, path, .. } = self.variable;
        let patches = std::mem::take(&mut self.patches);
        let Some((last, part)) = patches.last() else { return Ok(()) };
        let length = last + part.len() as u64 - self.first;
        if patches.len() == 1 || length / patches.len() as u64 > Self::DENSE {
            let write = |(place, part): (u64, Range<usize>)| file.write_all_at(&self.content[part], place);
            return patches.into_iter().try_for_each(write).map_err(at(path, "write"));
        }
        let mut all = vec![0; usize::try_from(length).unwrap_or_default()];
        file.read_exact_at(&mut all, self.first).map_err(at(path, "read"))?;
        for (place, part) in patches {
            let start = usize::try_from(place - self.first).unwrap_or_default();
            all[start..start + part.len()].copy_from_slice(&self.content[part]);
        }
        file.write_all_at(&all, self.first).map_err(at(path, "write"))
    }
}

/// What a journal begins with.
struct Beginning<'a> {
    task: &'a str,
    incarnations: &'a [u64],
    variables: &'a BTreeMap<u32, Variable>,
    calls: &'a [u8],
    flush: u64,
    time: u64,
}

impl Journal {
    fn begin(folder: &Path, number: u64, beginning: &Beginning<'_>) -> Result<Self, StateError> {
        let Beginning { task, incarnations, variables, calls, flush, time } = *beginning;
        let mut content = Vec::new();
        Record::Header { task, incarnations: incarnations.to_vec() }.write(&mut content);
        for (id, variable) in variables {
            Record::Variable { id: *id, definition: variable.definition.clone() }.write(&mut content);
        }
        Record::Calls(calls).write(&mut content);
        Record::Commit { flush, time }.write(&mut content);
        let path = journal_path(folder, number);
        let new = path.with_extension("new");
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true).open(&new).map_err(at(&new, "create"))?;
        file.write_all_at(&content, 0).map_err(at(&new, "write"))?;
        file.sync_all().map_err(at(&new, "synchronise"))?;
        fs::rename(&new, &path).map_err(at(&new, "rename"))?;
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(at(folder, "synchronise"))?;
        let end = content.len() as u64;
        Ok(Self { path, file, number, start: end, end })
    }

    /// Finds the last commit, and cuts off what follows.
    fn recover(folder: &Path, number: u64, task: &str) -> Result<Self, StateError> {
        let path = journal_path(folder, number);
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(at(&path, "open"))?;
        let length = file.metadata().map_err(at(&path, "examine"))?.len();
        let Some((start, end)) = commits(&file, &path, length)? else {
            return Err(StateError::Foreign { path, task: task.into() });
        };
        file.set_len(end).map_err(at(&path, "shorten"))?;
        Ok(Self { path, file, number, start, end })
    }
}

/// Where the first and the last commit of a journal end. None: it does not begin as journals do.
pub(crate) fn commits(file: &File, path: &Path, length: u64) -> Result<Option<(u64, u64)>, StateError> {
    let (mut begins, mut start, mut end) = (false, 0, 0);
    let stop = each(file, path, 0, length, |span, record| {
        match record {
            Record::Header { .. } => begins |= span.0 == 0,
            Record::Commit { .. } => {
                start = if end == 0 { span.1 } else { start };
                end = span.1;
            }
            _ => {}
        }
        Ok(())
    })?;
    if !begins {
        return Ok(None);
    }
    let mut commits_follow = false;
    if let Some(next) = after(file, path, stop, length)? {
        each(file, path, next, length, |_, record| {
            commits_follow |= matches!(record, Record::Commit { .. });
            Ok(())
        })?;
    }
    if end == 0 || commits_follow {
        let why = "its checksum is wrong, and what follows it was written later".into();
        return Err(StateError::Damaged { path: path.into(), at: stop, why });
    }
    Ok(Some((start, end)))
}

/// Calls `visit` with each whole record between these positions, and where it begins and ends. Returns where the first
/// one begins that is not whole, or `to`.
pub(crate) fn each(
    file: &File,
    path: &Path,
    from: u64,
    to: u64,
    mut visit: impl FnMut((u64, u64), Record<'_>) -> Result<(), StateError>,
) -> Result<u64, StateError> {
    let (mut position, mut content) = (from, Vec::new());
    while let Some(next) = after(file, path, position, to)? {
        let mut head = [0; HEAD];
        file.read_exact_at(&mut head, position).map_err(at(path, "read"))?;
        // `after` has bounded it.
        content.resize(usize::try_from(record::length(&head)).unwrap_or_default(), 0);
        file.read_exact_at(&mut content, position + HEAD as u64).map_err(at(path, "read"))?;
        if !record::is_whole(&head, &content) {
            break;
        }
        let record = record::read(head[HEAD - 1], &content).map_err(|unreadable| match unreadable {
            Unreadable::Version(found) => StateError::OtherVersion { path: path.into(), found, known: record::VERSION },
            Unreadable::Content(why) => StateError::Damaged { path: path.into(), at: position, why: why.into() },
        })?;
        visit((position, next), record)?;
        position = next;
    }
    Ok(position)
}

/// Where the record ends that begins here, by its length. None: it is longer than the file.
fn after(file: &File, path: &Path, position: u64, to: u64) -> Result<Option<u64>, StateError> {
    if to.saturating_sub(position) < HEAD as u64 {
        return Ok(None);
    }
    let mut head = [0; HEAD];
    file.read_exact_at(&mut head, position).map_err(at(path, "read"))?;
    let length = record::length(&head);
    Ok((length <= LONGEST && length <= to - position - HEAD as u64).then(|| position + HEAD as u64 + length))
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
        let (flush, time) = (self.store.flush + 1, self.time);
        self.write(&Record::Commit { flush, time });
        if let Some(error) = self.failed {
            return Err(error);
        }
        let Self { store, at: end, .. } = self;
        let Journal { path, file, .. } = &store.journal;
        file.sync_data().map_err(at(path, "synchronise"))?;
        let bytes = end - std::mem::replace(&mut store.journal.end, end);
        (store.flush, store.time, store.calls) = (flush, time, calls.to_vec());
        while let Some((id, definition)) = store.new.first_key_value() {
            let (id, variable) = (*id, Variable::open(&store.folder, *id, definition.clone(), false)?);
            store.variables.insert(id, variable);
            store.new.remove(&id);
        }
        for id in std::mem::take(&mut store.lost) {
            store.gone.extend(store.variables.remove(&id).map(|variable| variable.path));
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

/// The files of a folder, by number.
struct Files {
    journals: Vec<u64>,
    variables: Vec<u32>,
}

impl Files {
    /// Removes journals that were not finished.
    fn list(folder: &Path, task: &str) -> Result<Self, StateError> {
        let mut files = Self { journals: Vec::new(), variables: Vec::new() };
        for entry in fs::read_dir(folder).map_err(at(folder, "list"))? {
            let path = entry.map_err(at(folder, "list"))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if let Some(number) = number_after("journal-", name) {
                files.journals.push(number);
            } else if let Some(id) = number_after("variable-", name).and_then(|id| id.try_into().ok()) {
                files.variables.push(id);
            } else if name.starts_with("journal-") && name.ends_with(".new") {
                fs::remove_file(&path).map_err(at(&path, "remove the file"))?;
            } else if name != LOCK {
                return Err(StateError::Foreign { path, task: task.into() });
            }
        }
        files.journals.sort_unstable();
        files.variables.sort_unstable();
        Ok(files)
    }
}

/// The number in a file's name.
fn number_after(prefix: &str, name: &str) -> Option<u64> {
    let digits = name.strip_prefix(prefix).filter(|rest| rest.bytes().all(|b| b.is_ascii_digit()))?;
    digits.parse().ok()
}

/// The newest journal of a folder.
pub(crate) fn newest_journal(folder: &Path) -> Result<Option<PathBuf>, StateError> {
    let mut newest = None;
    for entry in fs::read_dir(folder).map_err(at(folder, "list"))? {
        let entry = entry.map_err(at(folder, "list"))?;
        newest = newest.max(entry.file_name().to_str().and_then(|name| number_after("journal-", name)));
    }
    Ok(newest.map(|number| journal_path(folder, number)))
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

fn journal_path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("journal-{number}"))
}

pub(crate) fn variable_path(folder: &Path, id: u32) -> PathBuf {
    folder.join(format!("variable-{id}"))
}

/// Milliseconds of Unix time.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
