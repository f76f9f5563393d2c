//! The process's limit of open descriptors.

use std::io;

use super::TransportError;

/// Ensures that `needed` descriptors may be open: raises the soft limit if necessary.
pub fn allow(needed: u64) -> Result<(), TransportError> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    let query = |source| TransportError::Query { what: "the descriptor limit", source };
    // SAFETY: the pointer is to a local value, which the call fills.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) } != 0 {
        return Err(query(io::Error::last_os_error()));
    }
    if limit.rlim_cur >= needed {
        return Ok(());
    }
    if limit.rlim_max < needed {
        return Err(TransportError::Descriptors { needed, hard: limit.rlim_max });
    }
    limit.rlim_cur = needed;
    // SAFETY: the pointer is to a local value, which the call only reads.
    if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) } != 0 {
        return Err(query(io::Error::last_os_error()));
    }
    Ok(())
}

/// The current soft limit.
pub fn allowed() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the pointer is to a local value, which the call fills.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    // No limit is RLIM_INFINITY, the largest number.
    if asked == 0 { usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX) } else { 1024 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allow_fails_only_above_the_hard_limit() {
        allow(1).unwrap();
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: as in `allow`.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
        if limit.rlim_max != libc::RLIM_INFINITY {
            let error = allow(limit.rlim_max + 1).unwrap_err().to_string();
            assert!(error.contains(&format!("the hard limit is {}", limit.rlim_max)), "{error}");
        }
    }
}
