//! Variables that are read into memory before this process has their state. What changes meanwhile is added when it
//! has: whoever waits for the state does not wait until everything is read.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::error::{StateError, at};
use crate::files::{journal_path, variable_path};
use crate::journal::{Journal, commits, each};
use crate::record::{self, Definition, Record, size};
use crate::variable::Variable;

/// The rows of a variable.
pub struct Content {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
}

impl Content {
    /// Of the address of the first row: what kernels expect.
    const ALIGNMENT: usize = 64;

    /// None: there is no memory for it.
    fn new(bytes: usize) -> Option<Self> {
        let mut memory = Vec::new();
        let all = bytes.checked_add(Self::ALIGNMENT)?;
        memory.try_reserve_exact(all).ok()?;
        memory.resize(all, 0);
        let start = memory.as_ptr().align_offset(Self::ALIGNMENT);
        (start <= Self::ALIGNMENT).then_some(Self { memory, start, bytes })
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..self.start + self.bytes]
    }
}

/// What was read, up to a commit in the newest journal.
pub struct Loaded {
    journal: u64,
    end: u64,
    variables: BTreeMap<u32, (Definition, Content)>,
}

/// Of copies that have taken over, and are not open yet.
static WAITING: Mutex<BTreeMap<PathBuf, Loaded>> = Mutex::new(BTreeMap::new());

impl Loaded {
    /// Reads a copy whose older journals are merged. None: there is no memory for it, or another journal has begun. If
    /// one begins while this reads, what it has read is of no use, and is not used.
    pub fn read(folder: &Path, journal: u64) -> Result<Option<Self>, StateError> {
        let path = journal_path(folder, journal);
        let file = File::open(&path).map_err(at(&path, "open"))?;
        let length = file.metadata().map_err(at(&path, "examine"))?.len();
        let Some((start, end)) = commits(&file, &path, length)? else { return Ok(None) };
        let mut loaded = Self { journal, end: 0, variables: BTreeMap::new() };
        let is_read = loaded.add(&file, &path, end, |id, content, position| {
            if position >= start {
                return Ok(());
            }
            let path = variable_path(folder, id);
            let file = File::open(&path).map_err(at(&path, "open"))?;
            file.read_exact_at(content, 0).map_err(at(&path, "read"))
        })?;
        Ok(is_read.then_some(loaded))
    }

    /// Adds what the journal has up to `end`; `fill` gets each new variable. False: there is no memory for it.
    fn add(
        &mut self,
        file: &File,
        path: &Path,
        end: u64,
        fill: impl Fn(u32, &mut [u8], u64) -> Result<(), StateError>,
    ) -> Result<bool, StateError> {
        let mut has_memory = true;
        let variables = &mut self.variables;
        let stop = each(file, path, self.end, end, |(position, _), record| {
            match record {
                // It may come again, and keeps its rows.
                Record::Variable { id, definition } if has_memory && !variables.contains_key(&id) => {
                    let content = Content::new(size(definition.rows, definition.row_bytes));
                    has_memory = content.is_some();
                    if let Some(mut content) = content {
                        fill(id, content.bytes_mut(), position)?;
                        variables.insert(id, (definition.clone(), content));
                    }
                }
                Record::Gone { id } => drop(variables.remove(&id)),
                Record::Rows { id, runs, content } => {
                    if let Some((definition, rows)) = variables.get_mut(&id) {
                        let is_whole = write(definition, rows.bytes_mut(), &runs, content).is_some();
                        let why = || "it has rows that the variable does not have".into();
                        let wrong = || StateError::Damaged { path: path.into(), at: position, why: why() };
                        return is_whole.then_some(()).ok_or_else(wrong);
                    }
                }
                _ => {}
            }
            Ok(())
        })?;
        self.end = stop;
        Ok(has_memory && stop == end)
    }

    /// Until the folder is opened.
    pub fn wait(self, folder: &Path) {
        WAITING.lock().unwrap_or_else(PoisonError::into_inner).insert(folder.into(), self);
    }

    /// What was read of this folder, with what was written to this journal since; nothing, if that was another one.
    pub(crate) fn of(folder: &Path, journal: &Journal) -> Result<Option<Self>, StateError> {
        let waiting = WAITING.lock().unwrap_or_else(PoisonError::into_inner).remove(folder);
        let Journal { path, file, number, end, .. } = journal;
        let found = waiting.filter(|loaded| loaded.journal == *number && loaded.end <= *end);
        let Some(mut loaded) = found else { return Ok(None) };
        let has_all = loaded.add(file, path, *end, |_, _, _| Ok(()))?;
        Ok(has_all.then_some(loaded))
    }

    /// Whether these are the variables that were read.
    pub(crate) fn has(&self, variables: &BTreeMap<u32, Variable>) -> bool {
        let is_same = |(id, (definition, _)): (&u32, &(Definition, Content))| {
            variables.get(id).is_some_and(|variable| variable.definition == *definition)
        };
        self.variables.len() == variables.len() && self.variables.iter().all(is_same)
    }

    pub(crate) fn into_contents(self) -> BTreeMap<u32, Content> {
        self.variables.into_iter().map(|(id, (_, content))| (id, content)).collect()
    }
}

/// None: they are not all rows of this variable.
fn write(definition: &Definition, rows: &mut [u8], runs: &[(u64, u64)], content: &[u8]) -> Option<()> {
    let mut from = 0;
    for (first, count) in runs {
        first.checked_add(*count).filter(|end| *end <= definition.rows)?;
        let part = record::part(from, *count, definition.row_bytes, content)?;
        from += part.len() as u64;
        let start = size(*first, definition.row_bytes);
        rows.get_mut(start..start + part.len())?.copy_from_slice(&content[part]);
    }
    Some(())
}
