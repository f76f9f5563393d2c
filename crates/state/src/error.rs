//! What can be wrong with a folder of state.

use std::io;
use std::path::{Path, PathBuf};

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("{path}: cannot {doing}: {source}")]
    Io { path: PathBuf, doing: &'static str, source: io::Error },
    #[error("{folder} is in use by another process")]
    InUse { folder: PathBuf },
    #[error("{folder} has no state of a parameter server")]
    Nothing { folder: PathBuf },
    #[error("{folder} is being read by another process")]
    Read { folder: PathBuf },
    #[error("{folder}: the server could not keep the flush that was being read: try again")]
    Withdrawn { folder: PathBuf },
    #[error("{folder} has a state of its own: to make it a copy of another one, remove the folder")]
    Taken { folder: PathBuf },
    #[error(
        "{folder} has a copy that has not taken over: set STARWIRE_STATE_FROM, or, if the owner has ended for good, run starctl state promote {folder}"
    )]
    Copy { folder: PathBuf },
    #[error("{folder} has no complete copy of a state, which could take over")]
    NoCopy { folder: PathBuf },
    #[error(
        "{folder} belongs to user {uid}, who might not be able to read what root writes there: run this as that user"
    )]
    OtherUser { folder: PathBuf, uid: u32 },
    #[error("{folder}: the state has moved to {to}: remove the folder, or begin there")]
    Moved { folder: PathBuf, to: String },
    #[error("{path} is no file of starwire's: the folder must be empty, or have the state of {task}")]
    Foreign { path: PathBuf, task: String },
    #[error("{path} is the state of {found}, not of {task}")]
    OtherTask { path: PathBuf, found: String, task: String },
    #[error("{path} has version {found} of the format; this starwire reads version {known}")]
    OtherVersion { path: PathBuf, found: u32, known: u32 },
    #[error("{path} is damaged at byte {at}: {why}")]
    Damaged { path: PathBuf, at: u64, why: String },
    #[error("{folder}: the table of calls is damaged")]
    Calls { folder: PathBuf },
    #[error("{folder}: {message}")]
    Restore { folder: PathBuf, message: String },
    #[error("{path} is damaged: it has {bytes} bytes instead of {expected}")]
    Length { path: PathBuf, bytes: u64, expected: u64 },
}

/// An error of the operating system at this file.
pub(crate) fn at<'a>(path: &'a Path, doing: &'static str) -> impl Fn(io::Error) -> StateError + 'a {
    move |source| StateError::Io { path: path.into(), doing, source }
}
