//! The state after its last commit, for a reader beside the server, which may go on writing.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::error::{StateError, at};
use crate::lock::share;
use crate::record::{self, Definition, Record};
use crate::store::{commits, each, newest_journal, variable_path};

/// A journal that seems damaged may only be one that the server is writing.
const ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(50);
const CHUNK: u64 = 1 << 20;

pub struct Snapshot {
    folder: PathBuf,
    task: String,
    /// With whether the journal began with it, so that its file has rows which the journal lacks.
    variables: BTreeMap<u32, (Definition, bool)>,
    flush: u64,
    time: u64,
    path: PathBuf,
    journal: File,
    end: u64,
    _shared: File,
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
        let shared = share(folder)?;
        let nothing = || StateError::Nothing { folder: folder.into() };
        let path = newest_journal(folder)?.ok_or_else(nothing)?;
        let journal = File::open(&path).map_err(at(&path, "open"))?;
        let length = journal.metadata().map_err(at(&path, "examine"))?.len();
        let (start, end) = commits(&journal, &path, length)?.ok_or_else(nothing)?;
        let (mut task, mut variables, mut flush, mut time) = (String::new(), BTreeMap::new(), 0, 0);
        each(&journal, &path, 0, end, |(position, _), record| {
            match record {
                Record::Header { task: found, .. } => task = found.into(),
                Record::Variable { id, definition } => {
                    variables.insert(id, (definition, position < start));
                }
                Record::Gone { id } => {
                    variables.remove(&id);
                }
                Record::Commit { flush: number, time: then } => (flush, time) = (number, then),
                Record::Rows { .. } | Record::Calls(_) => {}
            }
            Ok(())
        })?;
        Ok(Self { folder: folder.into(), task, variables, flush, time, path, journal, end, _shared: shared })
    }

    /// The task, and its cluster if that has a name.
    pub fn task(&self) -> &str {
        &self.task
    }

    pub fn variables(&self) -> impl Iterator<Item = (u32, &Definition)> {
        self.variables.iter().map(|(id, (definition, _))| (*id, definition))
    }

    /// The number of the last flush, and when it began, in milliseconds of Unix time.
    pub fn last_flush(&self) -> (u64, u64) {
        (self.flush, self.time)
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
        each(&self.journal, &self.path, 0, self.end, |(position, _), record| {
            let Record::Rows { id, runs, content } = record else { return Ok(()) };
            let Some((place, (definition, _))) = places.get(&id).zip(self.variables.get(&id)) else { return Ok(()) };
            let why = || "it has rows that the variable does not have".into();
            let wrong = || StateError::Damaged { path: self.path.clone(), at: position, why: why() };
            let mut from = 0;
            for (first, count) in runs {
                let is_inside = first.checked_add(count).is_some_and(|end| end <= definition.rows);
                let part = record::part(from, count, definition.row_bytes, content).filter(|_| is_inside);
                let part = part.ok_or_else(wrong)?;
                from += part.len() as u64;
                write(&content[part], place + first * definition.row_bytes)?;
            }
            Ok(())
        })?;
        Ok(())
    }
}
