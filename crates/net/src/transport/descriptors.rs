//! The process's limit of open descriptors.

use std::io;

use super::{TransportError, check};

/// Ensures that `needed` descriptors may be open: raises the soft limit if necessary.
pub fn allow(needed: u64) -> Result<(), TransportError> {
    let query = |source| TransportError::Query { what: "the descriptor limit", source };
    let mut limit = limit().map_err(query)?;
    if limit.rlim_cur >= needed {
        return Ok(());
    }
    if limit.rlim_max < needed {
        return Err(TransportError::Descriptors { needed, hard: limit.rlim_max });
    }
    limit.rlim_cur = needed;
    // SAFETY: the pointer is to a local value, which the call only reads.
    check(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) }).map_err(query)
}

/// The current soft limit.
pub fn allowed() -> usize {
    // No limit is RLIM_INFINITY, the largest number.
    limit().map_or(1024, |limit| usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX))
}

fn limit() -> io::Result<libc::rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local value, which the call fills.
    check(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }).map(|()| limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allow_fails_only_above_the_hard_limit() {
        allow(1).unwrap();
        let limit = limit().unwrap();
        if limit.rlim_max != libc::RLIM_INFINITY {
            let error = allow(limit.rlim_max + 1).unwrap_err().to_string();
            assert!(error.contains(&format!("the hard limit is {}", limit.rlim_max)), "{error}");
        }
    }
}
