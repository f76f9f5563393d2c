//! The executor's sources contain no lock and no type that allocates.

use std::fs;
use std::path::Path;

/// Strips comments and tests.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    code.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n")
}

fn found(code: &str, words: &[&str]) -> Vec<String> {
    let tokens = code.split(|c: char| !c.is_alphanumeric() && c != '_');
    tokens.filter(|token| words.contains(token)).map(str::to_string).collect()
}

const LOCKS: &[&str] = &[
    "Mutex",
    "RwLock",
    "Condvar",
    "Once",
    "OnceLock",
    "LazyLock",
    "Barrier",
    "ReentrantLock",
    "park",
    "parking_lot",
    "channel",
    "mpsc",
    "sleep",
];
const ALLOCATES: &[&str] =
    &["String", "format", "to_string", "to_owned", "HashMap", "BTreeMap", "VecDeque", "vec", "Vec", "push_str"];

#[test]
fn no_lock_in_the_executor() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut seen = 0;
    for entry in fs::read_dir(&folder).expect("crates/executor/src is there") {
        let path = entry.unwrap().path();
        let code = code(&fs::read_to_string(&path).unwrap());
        assert_eq!(found(&code, LOCKS), Vec::<String>::new(), "{}", path.display());
        // Compiling a plan allocates; the sources of a run do not even name a type that could.
        let of_a_run = ["run.rs", "queue.rs", "pool.rs", "arena.rs", "cost.rs"];
        if of_a_run.iter().any(|name| path.ends_with(name)) {
            assert_eq!(found(&code, ALLOCATES), Vec::<String>::new(), "{}", path.display());
            seen += 1;
        }
    }
    assert_eq!(seen, 5, "did the executor's sources move?");
}

#[test]
fn a_lock_would_be_found() {
    assert_eq!(found(&code("use std::sync::Mutex; // RwLock\nlet x = 1;"), LOCKS), ["Mutex"]);
}
