//! Builds the fake libibverbs if it is older than its sources, and controls its devices.

#![allow(
    clippy::undocumented_unsafe_blocks,
    reason = "calls into the fake library with the arguments that it documents"
)]
#![allow(dead_code, reason = "not every test binary needs all of it")]

use std::ffi::{CString, c_char, c_int};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::SystemTime;

/// In the workspace.
const SOURCES: [&str; 2] = ["crates/engine/tests/verbs/fake", "crates/net/src/transport/verbs/abi.rs"];

/// STARWIRE_TEST_REAL_VERBS=1 uses the system's libibverbs and its first device.
pub fn is_real() -> bool {
    std::env::var_os("STARWIRE_TEST_REAL_VERBS").is_some()
}

/// Path of the library.
pub fn path() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        if is_real() {
            return "libibverbs.so.1".to_owned();
        }
        // target/debug/deps/test-0123, or deeper with newer cargos → target/debug
        let own = std::env::current_exe().unwrap();
        let profile = own.ancestors().find(|path| path.ends_with("debug") || path.ends_with("release")).unwrap();
        let library = profile.join("examples/libibverbs.so");
        let root = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."));
        let newest = SOURCES.iter().map(|source| changed(&root.join(source))).max().unwrap();
        let built = std::fs::metadata(&library).and_then(|meta| meta.modified());
        if built.is_ok_and(|built| built > newest) {
            return library.to_str().unwrap().to_owned();
        }
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(root).args([
            "build",
            "--quiet",
            // Of all packages: a selection would have other features, and compile their dependencies again.
            "--example",
            "ibverbs",
            "--target-dir",
        ]);
        cargo.arg(profile.parent().unwrap());
        // Flags for another target, such as sanitizers', would break procedural macros here.
        cargo.env_remove("RUSTFLAGS");
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        assert!(cargo.status().unwrap().success(), "the fake libibverbs does not build");
        library.to_str().unwrap().to_owned()
    })
}

fn changed(path: &Path) -> SystemTime {
    if path.is_dir() {
        let entries = std::fs::read_dir(path).unwrap();
        return entries.map(|entry| changed(&entry.unwrap().path())).max().unwrap();
    }
    std::fs::metadata(PathBuf::from(path)).unwrap().modified().unwrap()
}

/// Creates a device with faults; `tests/verbs/fake/lib.rs` explains `spec`.
pub fn device(name: &str, spec: &str) {
    if is_real() {
        assert!(spec.is_empty(), "real devices have no faults on demand");
        return;
    }
    let make: unsafe extern "C" fn(*const c_char, *const c_char) =
        unsafe { std::mem::transmute(symbol("fake_verbs_device")) };
    let (name, spec) = (CString::new(name).unwrap(), CString::new(spec).unwrap());
    unsafe { make(name.as_ptr(), spec.as_ptr()) };
}

/// The number of a device's live objects.
pub fn alive(name: &str) -> i64 {
    if is_real() {
        return 0;
    }
    let count: unsafe extern "C" fn(*const c_char) -> i64 = unsafe { std::mem::transmute(symbol("fake_verbs_alive")) };
    let name = CString::new(name).unwrap();
    unsafe { count(name.as_ptr()) }
}

/// Registrations that overlap this memory with at least these rights. A real device does not tell.
pub fn covers(name: &str, ptr: *const u8, len: usize, access: c_int) -> i64 {
    if is_real() {
        return 0;
    }
    let count: unsafe extern "C" fn(*const c_char, u64, u64, c_int) -> i64 =
        unsafe { std::mem::transmute(symbol("fake_verbs_covers")) };
    let name = CString::new(name).unwrap();
    unsafe { count(name.as_ptr(), ptr as u64, len as u64, access) }
}

fn symbol(name: &str) -> *mut std::ffi::c_void {
    let (path, name) = (CString::new(path()).unwrap(), CString::new(name).unwrap());
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null(), "{path:?} cannot be loaded");
        let found = libc::dlsym(handle, name.as_ptr());
        assert!(!found.is_null());
        found
    }
}
