//! One process at a time.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind};
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::error::{StateError, at};

pub const LOCK: &str = "lock";

/// The folder is this process's until the file is closed.
pub fn lock(folder: &Path) -> Result<File, StateError> {
    let path = folder.join(LOCK);
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(false).open(&path).map_err(at(&path, "create"))?;
    // SAFETY: the descriptor is open.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(file);
    }
    match Error::last_os_error() {
        error if error.kind() == ErrorKind::WouldBlock => Err(StateError::InUse { folder: folder.into() }),
        error => Err(at(&path, "lock")(error)),
    }
}
