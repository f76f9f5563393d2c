//! One process at a time uses a folder, beside readers.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::{StateError, at};

pub const LOCK: &str = "lock";

/// The files of the variables do not change until this is dropped.
pub fn share(folder: &Path) -> Result<File, StateError> {
    flock(folder, libc::LOCK_SH)?.map_or_else(|| Err(StateError::InUse { folder: folder.into() }), Ok)
}

/// The same, unless they are being changed.
pub fn try_share(folder: &Path) -> Result<Option<File>, StateError> {
    flock(folder, libc::LOCK_SH | libc::LOCK_NB)
}

/// Until this is dropped nobody reads the files of the variables. None: somebody does.
pub fn exclude_readers(folder: &Path) -> Result<Option<File>, StateError> {
    flock(folder, libc::LOCK_EX | libc::LOCK_NB)
}

/// Until this is dropped, other callers wait.
pub fn lock_folder(folder: &Path) -> Result<File, StateError> {
    flock(folder, libc::LOCK_EX)?.map_or_else(|| Err(StateError::InUse { folder: folder.into() }), Ok)
}

fn flock(path: &Path, operation: i32) -> Result<Option<File>, StateError> {
    let file = File::open(path).map_err(at(path, "open"))?;
    lock_file(&file, path, operation).map(|is_locked| is_locked.then_some(file))
}

/// False: another process has it.
fn lock_file(file: &File, path: &Path, operation: i32) -> Result<bool, StateError> {
    // SAFETY: the descriptor is open.
    if unsafe { libc::flock(file.as_raw_fd(), operation) } == 0 {
        return Ok(true);
    }
    match Error::last_os_error() {
        error if error.kind() == ErrorKind::WouldBlock => Ok(false),
        error => Err(at(path, "lock")(error)),
    }
}

/// The user whose folder it is, if this process is root's: that user might not be able to read what root writes there.
pub fn owner_beside_root(folder: &Path) -> Result<Option<u32>, StateError> {
    let owner = folder.metadata().map_err(at(folder, "look at"))?.uid();
    // SAFETY: nothing has to hold.
    let is_root = unsafe { libc::geteuid() } == 0;
    Ok((is_root && owner != 0).then_some(owner))
}

/// The folder is this process's until the file is closed.
pub fn lock(folder: &Path) -> Result<File, StateError> {
    let path = folder.join(LOCK);
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(&path).map_err(at(&path, "create"))?;
    if lock_file(&file, &path, libc::LOCK_EX | libc::LOCK_NB)? {
        return Ok(file);
    }
    Err(StateError::InUse { folder: folder.into() })
}
