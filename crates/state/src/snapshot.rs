//! The state after its last commit, for a reader beside the server, which may go on writing.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{StateError, at};
use crate::files::{journals, refuse_marked, variable_path};
use crate::journal::{commits, each};
use crate::lock::share;
use crate::record::{self, Definition, Record};

/// A journal that seems damaged may only be one that the server is writing.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);
const CHUNK: u64 = 1 << 20;

pub struct Snapshot {
    folder: PathBuf,
    task: String,
    incarnations: Vec<u64>,
    /// With whether the first journal began with it, so that its file has rows which the journals lack.
    variables: BTreeMap<u32, (Definition, bool)>,
    /// The number of each flush in the journals, and when it began. The first one is the last one before them.
    flushes: Vec<(u64, u64)>,
    /// The oldest first, each with its path, and where its last commit ends.
    journals: Vec<(File, PathBuf, u64)>,
    _shared: File,
}

/// Rows of variables that have changed, a bit for each.
pub struct Changes(BTreeMap<u32, Vec<u64>>);

impl Changes {
    /// The rows of a variable in their order. None: none has changed.
    pub fn rows(&self, id: u32) -> Option<Vec<u64>> {
        let words = self.0.get(&id)?.iter().zip((0..).step_by(64));
        Some(
            words
                .flat_map(|(word, at)| (0..64).filter(move |bit| word >> bit & 1 != 0).map(move |bit| at + bit))
                .collect(),
        )
    }
}

impl Snapshot {
    /// The server does not change the files of its variables while this exists; its journal grows.
    pub fn open(folder: &Path) -> Result<Self, StateError> {
        for _ in 1..ATTEMPTS {
            match Self::try_open(folder) {
                Err(StateError::Damaged { .. }) => std::thread::sleep(PAUSE),
                other => return other,
            }
        }
        Self::try_open(folder)
    }

    fn try_open(folder: &Path) -> Result<Self, StateError> {
        refuse_marked(folder)?;
        let shared = share(folder)?;
        let nothing = || StateError::Nothing { folder: folder.into() };
        let mut all = Self {
            folder: folder.into(),
            task: String::new(),
            incarnations: Vec::new(),
            variables: BTreeMap::new(),
            flushes: Vec::new(),
            journals: Vec::new(),
            _shared: shared,
        };
        for (_, path) in journals(folder)? {
            let journal = File::open(&path).map_err(at(&path, "open"))?;
            let length = journal.metadata().map_err(at(&path, "examine"))?.len();
            let (start, end) = commits(&journal, &path, length)?.ok_or_else(nothing)?;
            each(&journal, &path, 0, end, |(position, _), record| {
                match record {
                    Record::Header { task, incarnations } => (all.task, all.incarnations) = (task.into(), incarnations),
                    Record::Variable { id, definition } => {
                        let begins = position < start;
                        all.variables.entry(id).or_insert((definition, begins));
                    }
                    Record::Gone { id } => {
                        all.variables.remove(&id);
                    }
                    // A journal begins with the last one before it.
                    Record::Commit { flush, time } if all.flushes.last() != Some(&(flush, time)) => {
                        all.flushes.push((flush, time));
                    }
                    Record::Commit { .. } | Record::Rows { .. } | Record::Calls(_) => {}
                }
                Ok(())
            })?;
            all.journals.push((journal, path, end));
        }
        // It may have moved meanwhile.
        refuse_marked(folder)?;
        if all.journals.is_empty() { Err(nothing()) } else { Ok(all) }
    }

    /// The task, and its cluster if that has a name.
    pub fn task(&self) -> &str {
        &self.task
    }

    /// Of the task's devices. A state that began anew has others.
    pub fn incarnations(&self) -> &[u64] {
        &self.incarnations
    }

    pub fn variables(&self) -> impl Iterator<Item = (u32, &Definition)> {
        self.variables.iter().map(|(id, (definition, _))| (*id, definition))
    }

    /// The number of the last flush, and when it began, in milliseconds of Unix time.
    pub fn last_flush(&self) -> (u64, u64) {
        self.flushes.last().copied().unwrap_or_default()
    }

    /// Writes the rows of variables to a new file, each from its place on.
    pub fn copy(&self, places: &BTreeMap<u32, u64>, out: &File, out_path: &Path) -> Result<(), StateError> {
        let write = |bytes: &[u8], place| out.write_all_at(bytes, place).map_err(at(out_path, "write"));
        for (id, place) in places {
            let Some((definition, true)) = self.variables.get(id) else { continue };
            let (path, expected) = (variable_path(&self.folder, *id), definition.size().unwrap_or_default());
            let file = File::open(&path).map_err(at(&path, "open"))?;
            let bytes = file.metadata().map_err(at(&path, "examine"))?.len();
            if bytes != expected {
                return Err(StateError::Length { path, bytes, expected });
            }
            let mut done = 0;
            while done < bytes {
                let mut chunk = vec![0; record::size(1, CHUNK.min(bytes - done))];
                file.read_exact_at(&mut chunk, done).map_err(at(&path, "read"))?;
                write(&chunk, place + done)?;
                done += chunk.len() as u64;
            }
        }
        // The last value of each row counts.
        self.each_run(0, |id, first, _, definition, content| match places.get(&id) {
            Some(place) => write(content, place + first * definition.row_bytes),
            None => Ok(()),
        })
    }

    /// What has changed after this flush: its number, and when it began. Of a state that went back, because it was
    /// lost and an older copy of it goes on, later flushes have the numbers of those that were lost. None: the journals
    /// do not have this flush, because they are younger, or it is one of those.
    pub fn changes(&self, since: (u64, u64)) -> Result<Option<Changes>, StateError> {
        if !self.flushes.contains(&since) {
            return Ok(None);
        }
        let (since, _) = since;
        let mut rows: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
        self.each_run(since, |id, first, count, definition, _| {
            let words = record::size(definition.rows.div_ceil(64), 1);
            let found = rows.entry(id).or_insert_with(|| vec![0; words]);
            (first..first + count).for_each(|row| found[record::size(row / 64, 1)] |= 1 << (row % 64));
            Ok(())
        })?;
        Ok(Some(Changes(rows)))
    }

    /// Writes the rows that have changed after this flush one after the other, from the places of their variables on.
    pub fn copy_changes(
        &self,
        since: u64,
        changes: &Changes,
        places: &BTreeMap<u32, u64>,
        out: &File,
        out_path: &Path,
    ) -> Result<(), StateError> {
        // How many changed rows are before each word of bits.
        let ranks = |words: &Vec<u64>| {
            let sums =
                words.iter().scan(0, |sum, word| Some(std::mem::replace(sum, *sum + u64::from(word.count_ones()))));
            sums.collect::<Vec<u64>>()
        };
        let ranks: BTreeMap<u32, Vec<u64>> = changes.0.iter().map(|(id, words)| (*id, ranks(words))).collect();
        self.each_run(since, |id, first, _, definition, content| {
            let (Some(place), Some(words), Some(ranks)) = (places.get(&id), changes.0.get(&id), ranks.get(&id)) else {
                return Ok(());
            };
            let (word, bit) = (record::size(first / 64, 1), first % 64);
            // All rows of a run have changed: they follow each other.
            let rank = ranks[word] + u64::from((words[word] & ((1 << bit) - 1)).count_ones());
            out.write_all_at(content, place + rank * definition.row_bytes).map_err(at(out_path, "write"))
        })
    }

    /// Calls `visit` with each run of rows that was written after this flush: the variable, the first row, the number
    /// of rows, and their content.
    fn each_run(
        &self,
        since: u64,
        mut visit: impl FnMut(u32, u64, u64, &Definition, &[u8]) -> Result<(), StateError>,
    ) -> Result<(), StateError> {
        let (mut flush, mut last) = (0, (0, 0));
        let withdrawn = || StateError::Withdrawn { folder: self.folder.clone() };
        for (journal, path, end) in &self.journals {
            let stop = each(journal, path, 0, *end, |(position, _), record| {
                let (id, runs, content) = match record {
                    Record::Rows { id, runs, content } if flush >= since => (id, runs, content),
                    Record::Commit { flush: number, time } => {
                        (flush, last) = (number, (number, time));
                        return Ok(());
                    }
                    _ => return Ok(()),
                };
                let Some((definition, _)) = self.variables.get(&id) else { return Ok(()) };
                let why = || "it has rows that the variable does not have".into();
                let wrong = || StateError::Damaged { path: path.clone(), at: position, why: why() };
                let mut from = 0;
                for (first, count) in runs {
                    let is_inside = first.checked_add(count).is_some_and(|end| end <= definition.rows);
                    let part = record::part(from, count, definition.row_bytes, content).filter(|_| is_inside);
                    let part = part.ok_or_else(wrong)?;
                    from += part.len() as u64;
                    visit(id, first, count, definition, &content[part])?;
                }
                Ok(())
            })?;
            if stop != *end {
                return Err(withdrawn());
            }
        }
        // A commit that does not reach the disk is no commit, although it was seen: the next flush is in its place.
        if last == self.last_flush() { Ok(()) } else { Err(withdrawn()) }
    }
}
