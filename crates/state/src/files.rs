//! The names of the files in a folder.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::{StateError, at};
use crate::lock::LOCK;

/// A mark: the folder has a copy that has not taken over.
pub const COPY: &str = "copy";
/// Of a mark, and of a journal, that is being written.
pub const NEW: &str = "new";
/// A mark: the state has another owner, at the address in the file.
pub const MOVED: &str = "moved";
/// Where the state was before it was taken over.
pub const FROM: &str = "from";
/// Beside [`COPY`]: the owner has ended, and the copy may take over.
pub const PROMOTE: &str = "promote";

pub fn is_marked(folder: &Path, mark: &str) -> bool {
    folder.join(mark).exists()
}

/// The state of a task is not here if this is a copy, or if it has moved.
pub fn refuse_marked(folder: &Path) -> Result<(), StateError> {
    if is_marked(folder, COPY) {
        return Err(StateError::Copy { folder: folder.into() });
    }
    let mark = folder.join(MOVED);
    if !mark.exists() {
        return Ok(());
    }
    let to = fs::read_to_string(&mark).map_err(at(&mark, "read"))?;
    Err(StateError::Moved { folder: folder.into(), to: to.trim().chars().take(256).collect() })
}

/// The files of a folder, by number.
pub struct Files {
    pub journals: Vec<u64>,
    pub variables: Vec<u32>,
}

impl Files {
    /// Those of a state. Removes journals that were not finished.
    pub fn list(folder: &Path, task: &str) -> Result<Self, StateError> {
        refuse_marked(folder)?;
        Self::unmarked(folder, task)
    }

    /// The same, whether or not it is a copy, or has moved.
    pub fn unmarked(folder: &Path, task: &str) -> Result<Self, StateError> {
        let mut files = Self { journals: Vec::new(), variables: Vec::new() };
        for entry in fs::read_dir(folder).map_err(at(folder, "list"))? {
            let path = entry.map_err(at(folder, "list"))?.path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            if let Some(number) = number_after("journal-", name) {
                files.journals.push(number);
            } else if let Some(id) = number_after("variable-", name).and_then(|id| id.try_into().ok()) {
                files.variables.push(id);
            } else if path.extension().is_some_and(|extension| extension == NEW) && is_own(&path.with_extension("")) {
                fs::remove_file(&path).map_err(at(&path, "remove the file"))?;
            } else if name != LOCK && !MARKS.contains(&name) {
                return Err(StateError::Foreign { path, task: task.into() });
            }
        }
        files.journals.sort_unstable();
        files.variables.sort_unstable();
        Ok(files)
    }
}

const MARKS: [&str; 4] = [COPY, MOVED, PROMOTE, FROM];

/// Whether it is a mark, or a journal.
fn is_own(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    MARKS.contains(&name) || number_after("journal-", name).is_some()
}

/// The number in a file's name.
fn number_after(prefix: &str, name: &str) -> Option<u64> {
    let digits = name.strip_prefix(prefix).filter(|rest| rest.bytes().all(|b| b.is_ascii_digit()))?;
    digits.parse().ok()
}

/// The journals of a folder with their numbers, the oldest first.
pub fn journals(folder: &Path) -> Result<Vec<(u64, PathBuf)>, StateError> {
    let mut numbers = Vec::new();
    for entry in fs::read_dir(folder).map_err(at(folder, "list"))? {
        let entry = entry.map_err(at(folder, "list"))?;
        numbers.extend(entry.file_name().to_str().and_then(|name| number_after("journal-", name)));
    }
    numbers.sort_unstable();
    Ok(numbers.into_iter().map(|number| (number, journal_path(folder, number))).collect())
}

/// Whether this is the folder of a state, or of a copy.
pub fn has_state(folder: &Path) -> bool {
    journals(folder).is_ok_and(|journals| !journals.is_empty())
}

pub fn journal_path(folder: &Path, number: u64) -> PathBuf {
    folder.join(format!("journal-{number}"))
}

pub fn variable_path(folder: &Path, id: u32) -> PathBuf {
    folder.join(format!("variable-{id}"))
}
