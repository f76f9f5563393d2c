//! From a journal to the files of the variables.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use crate::error::{StateError, at};
use crate::journal::{Journal, after, each};
use crate::record::Record;
use crate::variable::{Rows, Variable};
use starwire_marks::fail_point;

/// What a journal says.
pub struct Merged {
    pub incarnations: Vec<u64>,
    pub variables: BTreeMap<u32, Variable>,
    /// Files of variables that no longer exist, but with which the journal begins.
    pub gone: Vec<PathBuf>,
    pub next_id: u32,
    pub calls: Vec<u8>,
    pub flush: u64,
    pub time: u64,
}

/// Writes what is committed in the journal to the files of the variables. `recovers`: they must be there already, if
/// the journal began with them.
pub fn merge(folder: &Path, task: &str, journal: &Journal, recovers: bool) -> Result<Merged, StateError> {
    let (all, rows) = read(folder, task, journal, recovers)?;
    write(&all, rows, journal)?;
    Ok(all)
}

/// What the journal says, and where its rows are: for each, the variable and the position of the record.
pub fn read(
    folder: &Path,
    task: &str,
    journal: &Journal,
    recovers: bool,
) -> Result<(Merged, Vec<(u32, u64)>), StateError> {
    let Journal { path, file, end, .. } = journal;
    let (mut must_exist, mut rows) = (recovers, Vec::new());
    let mut all = Merged {
        incarnations: Vec::new(),
        variables: BTreeMap::new(),
        gone: Vec::new(),
        next_id: 1,
        calls: Vec::new(),
        flush: 0,
        time: 0,
    };
    let stop = each(file, path, 0, *end, |(position, _), record| {
        match record {
            Record::Header { task: found, .. } if found != task => {
                return Err(StateError::OtherTask { path: path.clone(), found: found.into(), task: task.into() });
            }
            Record::Header { incarnations, .. } => all.incarnations = incarnations,
            Record::Variable { id, definition } => {
                all.next_id = id.saturating_add(1).max(all.next_id);
                all.variables.insert(id, Variable::open(folder, id, definition, must_exist)?);
            }
            Record::Rows { id, .. } => rows.push((id, position)),
            Record::Gone { id } => all.gone.extend(all.variables.remove(&id).map(|variable| variable.path)),
            Record::Calls(calls) => all.calls = calls.to_vec(),
            Record::Commit { flush, time } => {
                (all.flush, all.time) = (flush, time);
                must_exist = false;
            }
        }
        Ok(())
    })?;
    if stop != *end {
        let why = "its checksum is wrong, and what follows it was committed".into();
        return Err(StateError::Damaged { path: path.clone(), at: stop, why });
    }
    Ok((all, rows))
}

/// Writes these rows to the files of the variables.
pub fn write(all: &Merged, rows: Vec<(u32, u64)>, journal: &Journal) -> Result<(), StateError> {
    let Journal { path, file, end, .. } = journal;
    // Each row once: the last one counts.
    let mut written: BTreeMap<u32, Rows> = BTreeMap::new();
    for (id, position) in rows.into_iter().rev() {
        let Some(variable) = all.variables.get(&id) else { continue };
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

/// Removes a journal, all of which is in the files of the variables.
pub fn remove(folder: &Path, journal: &Journal, merged: &Merged) -> Result<(), StateError> {
    fail_point!("a journal is merged, and is still there");
    for Variable { path, file, .. } in merged.variables.values() {
        file.sync_data().map_err(at(path, "synchronise"))?;
    }
    // An attempt that has failed half-way may have removed it.
    let remove = |path: &PathBuf| match fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(at(path, "remove the file")(error)),
        _ => Ok(()),
    };
    remove(&journal.path)?;
    fail_point!("a journal is removed, and files of variables are left");
    // A journal that comes back with the power needs the files of the variables with which it began.
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(at(folder, "synchronise"))?;
    merged.gone.iter().try_for_each(remove)
}
