//! The state of one parameter server in a folder: its variables, and the calls that it has applied.
//!
//! ```text
//! variable-7       the rows of a variable, one after the other, without a header
//! journal-3        a header, the list of variables, then the changes of each flush and a commit
//! lock             held by the process that uses the folder
//! copy, moved      marks: not the state yet, not the state any more (copy.rs)
//! from             where the state was before, if it was a copy
//! .                the folder itself is locked by whoever reads, or changes, the files of variables
//! ```
//!
//! A flush goes to the newest journal. Bytes after its last commit are dropped. When a journal is longer than the
//! variables, a new one begins; beside it, the last value of each row of the old one goes to the files of the
//! variables, in place; they are synchronised, and the old journal is removed. A process that dies meanwhile leaves a
//! journal from which the next one repeats that: rows are values, not differences, so that repeating does no harm. The
//! folder takes at most three times the size of the variables, and the last flush.

#![deny(unsafe_code)]

pub mod codec;
mod copy;
mod error;
mod files;
mod journal;
mod loaded;
#[allow(unsafe_code)]
mod lock;
mod merge;
mod record;
mod snapshot;
mod store;
mod variable;

pub use copy::{PIECE, Replica, Source, promote, state_of};
pub use error::StateError;
pub use files::has_state;
pub use loaded::{Content, Loaded};
pub use lock::lock_folder;
pub use record::Definition;
pub use snapshot::{Changes, Snapshot};
pub use store::{Committed, Flush, Merges, Store};
