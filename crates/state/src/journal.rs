//! Journals: what they begin with, and where they end.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use crate::error::{StateError, at};
use crate::files::journal_path;
use crate::record::{self, HEAD, Record, Unreadable};
use crate::variable::Variable;
use starwire_marks::fail_point;

pub struct Journal {
    pub path: PathBuf,
    pub file: File,
    pub number: u64,
    /// The length of what it began with.
    pub start: u64,
    /// Where its last commit ends.
    pub end: u64,
}

/// What a journal begins with.
pub struct Beginning<'a> {
    pub task: &'a str,
    pub incarnations: &'a [u64],
    pub variables: &'a BTreeMap<u32, Variable>,
    pub calls: &'a [u8],
    pub flush: u64,
    pub time: u64,
}

impl Journal {
    pub fn begin(folder: &Path, number: u64, beginning: &Beginning<'_>) -> Result<Self, StateError> {
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
        fail_point!("a new journal is written, and has no name");
        fs::rename(&new, &path).map_err(at(&new, "rename"))?;
        if let Err(error) = File::open(folder).and_then(|folder| folder.sync_all()) {
            // The old journal goes on. After a restart, this one would count as what came last.
            fs::remove_file(&path).map_err(at(&path, "remove"))?;
            return Err(at(folder, "synchronise")(error));
        }
        let end = content.len() as u64;
        Ok(Self { path, file, number, start: end, end })
    }

    /// Finds the last commit, and cuts off what follows.
    pub fn recover(folder: &Path, number: u64, task: &str) -> Result<Self, StateError> {
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
pub fn commits(file: &File, path: &Path, length: u64) -> Result<Option<(u64, u64)>, StateError> {
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
pub fn each(
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
pub fn after(file: &File, path: &Path, position: u64, to: u64) -> Result<Option<u64>, StateError> {
    if to.saturating_sub(position) < HEAD as u64 {
        return Ok(None);
    }
    let mut head = [0; HEAD];
    file.read_exact_at(&mut head, position).map_err(at(path, "read"))?;
    let length = record::length(&head);
    Ok((length <= to - position - HEAD as u64).then(|| position + HEAD as u64 + length))
}
