//! Standard output, whose reader may have seen enough (`| head`).

use std::fmt::Display;
use std::io::{ErrorKind, Write, stderr, stdout};

use crate::failure::Failure;

/// Prints a line. Without a reader the command ends quietly: it has nothing else to do.
pub fn say(line: impl Display) -> Result<(), Failure> {
    print(format_args!("{line}\n"))
}

/// The same for a text with its newlines.
pub fn print(text: impl Display) -> Result<(), Failure> {
    // At once: a table in many pieces is slow, and its first line alone may end the command.
    let written = stdout().write_all(text.to_string().as_bytes()).and_then(|()| stdout().flush());
    written.map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Failure::Unread,
        _ => Failure::Failed(format!("cannot write to standard output: {error}")),
    })
}

/// Of a command that does, or finds out, more than it prints: it goes on without a reader.
pub fn unless_unread(printed: Result<(), Failure>) -> Result<(), Failure> {
    match printed {
        Err(Failure::Unread) => Ok(()),
        other => other,
    }
}

/// Prints a line to standard error, if that can be.
pub fn complain(line: impl Display) {
    let _ = writeln!(stderr(), "{line}");
}
