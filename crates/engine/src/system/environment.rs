//! A secret in the environment of this process, which others can read in `/proc` and which every process that is
//! started from here would inherit.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsString};
use std::os::unix::ffi::OsStringExt;
use std::sync::{Mutex, PoisonError};

/// Values that were taken: a process may have several servers.
static TAKEN: Mutex<BTreeMap<String, OsString>> = Mutex::new(BTreeMap::new());

/// The value of a variable, which is empty from now on; this function still knows it.
pub fn take(name: &str) -> Option<OsString> {
    let mut taken = TAKEN.lock().unwrap_or_else(PoisonError::into_inner);
    let value = {
        let name = CString::new(name).ok()?;
        // SAFETY: the name ends with a zero byte. As for every reader of the environment, nobody may change it
        // meanwhile.
        let found = unsafe { libc::getenv(name.as_ptr()) };
        if found.is_null() {
            return None;
        }
        // SAFETY: values end with a zero byte.
        let value = unsafe { CStr::from_ptr(found) }.to_bytes().to_vec();
        // SAFETY: the value is as long, and the environment belongs to the process, which may write to it.
        unsafe { found.write_bytes(0, value.len()) };
        OsString::from_vec(value)
    };
    if value.is_empty() {
        return Some(taken.get(name).cloned().unwrap_or(value));
    }
    taken.insert(name.to_owned(), value.clone());
    Some(value)
}
