//! House rules that can be checked automatically.

#![allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use starwire_engine::config::Protocol;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn files(folder: &str, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut todo = vec![root().join(folder)];
    while let Some(folder) = todo.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.expect("the folder can be listed").path();
            if path.is_dir() {
                // Nobody reads what a program wrote.
                todo.extend(Some(path).filter(|path| !path.ends_with("generated")));
            } else if path.extension().is_some_and(|found| found == extension) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in ["docs", "bazel", "benches", "crates", "deploy", "examples", "fuzz", "python", "scripts", "tests"] {
        found.extend(files(folder, "md"));
    }
    found.extend(["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"].map(|name| root().join(name)));
    found
}

/// Collapses line breaks and indentation.
fn in_one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// starwire's crates that a manifest depends on.
fn dependencies(manifest: &str) -> Vec<String> {
    let text = read(manifest);
    let names = text.lines().filter_map(|line| line.strip_prefix("starwire-"));
    names.filter_map(|line| line.split([' ', '.', '=']).next().map(str::to_owned)).collect()
}

/// Which crate may know which: each only those that stand above it here.
const CRATES: [(&str, &[&str]); 10] = [
    ("crates/marks", &[]),
    ("crates/executor", &["marks"]),
    ("crates/net", &[]),
    ("crates/planner", &["marks"]),
    ("crates/protocol", &["marks"]),
    ("crates/state", &["marks"]),
    ("crates/engine", &["marks", "net", "planner", "protocol", "state"]),
    ("crates/starctl", &["engine", "net", "planner", "protocol", "state"]),
    ("benches/swarm", &["net", "protocol"]),
    (".", &["engine", "executor", "marks", "net", "planner", "protocol", "state"]),
];

#[test]
fn generated_code_is_that_of_the_protos() {
    let all = files("crates/engine/src/control/generated", "rs");
    assert_eq!(all.len(), 2);
    for made in all {
        let text = fs::read_to_string(&made).expect("generated code");
        let proto = text.strip_prefix("// From ").and_then(|rest| rest.split_once(','));
        let (proto, rest) = proto.unwrap_or_else(|| panic!("{made:?} does not say what it is made from"));
        let checksum = format!("{:08x}", crc32c::crc32c(read(proto).as_bytes()));
        assert!(rest.contains(&checksum), "{made:?} is older than {proto}: run `make proto`");
    }
}

#[test]
fn crates_depend_only_on_lower_crates() {
    for (folder, allowed) in CRATES {
        assert_eq!(dependencies(&format!("{folder}/Cargo.toml")), allowed, "{folder}");
    }
    let members = fs::read_dir(root().join("crates")).expect("crates/ is there").count();
    // Besides these, the root and benches/swarm.
    assert_eq!(members + 2, CRATES.len(), "a new crate: which ones may it depend on?");
}

/// The modules at the top of a crate, each with those that it imports. A module's tests do not count.
fn modules(krate: &str) -> BTreeMap<String, BTreeSet<String>> {
    let source = root().join(krate).join("src");
    let top = |path: &Path| {
        let first = path.strip_prefix(&source).expect("in src").components().next().expect("a name");
        first.as_os_str().to_string_lossy().trim_end_matches(".rs").to_owned()
    };
    let paths = files(&format!("{krate}/src"), "rs");
    let mut found: BTreeMap<String, BTreeSet<String>> = paths.iter().map(|path| (top(path), BTreeSet::new())).collect();
    for path in paths {
        let depth = path.strip_prefix(&source).expect("in src").components().count();
        let is_root_of_folder = path.file_name().is_some_and(|name| name == "mod.rs");
        let up = if depth == 1 || (depth == 2 && is_root_of_folder) { "super::" } else { "super::super::" };
        let text = fs::read_to_string(&path).expect("a source");
        let text = text.split("#[cfg(test)]\nmod").next().unwrap_or_default().replace(up, "crate::");
        for after in text.split("crate::").skip(1) {
            let names = after.strip_prefix('{').map_or(after, |list| list.split('}').next().unwrap_or_default());
            let names = if after.starts_with('{') {
                names
            } else {
                names.split([':', ';', ',', ' ', '(', '<', '>']).next().unwrap_or_default()
            };
            let words = names.split(|c: char| !c.is_alphanumeric() && c != '_').map(str::to_owned);
            let from = top(&path);
            let known: Vec<String> = words.filter(|word| *word != from && found.contains_key(word)).collect();
            found.entry(from).or_default().extend(known);
        }
    }
    found
}

/// Modules of which each imports, through others, the others.
fn knots(modules: &BTreeMap<String, BTreeSet<String>>) -> Vec<Vec<&str>> {
    let reachable = |from: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from.to_owned()]);
        while let Some(module) = next.pop() {
            next.extend(modules[&module].iter().filter(|other| seen.insert((*other).clone())).cloned());
        }
        seen
    };
    let all: BTreeMap<&str, BTreeSet<String>> = modules.keys().map(|name| (name.as_str(), reachable(name))).collect();
    let mutual = |name: &&str| {
        all.keys().copied().filter(|other| all[name].contains(*other) && all[other].contains(*name)).collect()
    };
    let knots: BTreeSet<Vec<&str>> = all.keys().map(mutual).filter(|knot: &Vec<&str>| knot.len() > 1).collect();
    knots.into_iter().collect()
}

/// Modules that still import each other in a circle, by crate. These numbers may only become smaller.
const KNOTS: [(&str, usize); 7] = [
    ("crates/engine", 0),
    ("crates/executor", 0),
    ("crates/net", 0),
    ("crates/planner", 0),
    ("crates/protocol", 0),
    ("crates/state", 0),
    ("crates/starctl", 0),
];

#[test]
fn modules_import_each_other_in_no_circle() {
    for (krate, allowed) in KNOTS {
        let modules = modules(krate);
        let knots = knots(&modules);
        assert_eq!(knots.iter().map(Vec::len).sum::<usize>(), allowed, "{krate}: {knots:#?}");
    }
    // A circle would be found.
    let imports = |names: [&str; 2]| (names[0].to_owned(), BTreeSet::from([names[1].to_owned()]));
    let planted = [["a", "b"], ["b", "c"], ["c", "a"], ["d", "a"]].map(imports).into();
    assert_eq!(knots(&planted), [["a", "b", "c"]]);
}

/// The quoted names in files of a folder that this text precedes.
fn named_after(before: &str, folder: &str) -> BTreeSet<String> {
    let texts = files(folder, "rs").into_iter().map(|path| fs::read_to_string(path).expect("a source"));
    let names = |text: String| {
        let found = text.split(before).skip(1).filter_map(|rest| rest.split('"').next());
        found.map(str::to_owned).collect::<Vec<_>>()
    };
    texts.flat_map(names).collect()
}

/// Marks that are expected all at once: the file, and the words around their list.
const LISTED: [(&str, &str, &str); 2] = [
    ("crates/protocol/tests/sim/world.rs", "const RARE:", "];"),
    ("crates/engine/tests/verbs/faults.rs", "let _reached = [", "starwire_marks::expect"),
];

/// Of the crates with marks. crates/net, crates/state, crates/starctl, cc/ and Python have none: nothing checks there
/// that a test reaches a place which only a rare order of events leads to, except the assertions of the test.
#[test]
fn each_coverage_mark_is_expected_by_a_test() {
    let marks: BTreeSet<String> = ["executor", "planner", "protocol", "engine"]
        .iter()
        .flat_map(|name| named_after("mark!(\"", &format!("crates/{name}/src")))
        .collect();
    assert!(marks.len() > 20, "{marks:?}");
    let texts = files("crates", "rs").into_iter().filter(|path| {
        let is_tests = |name: &std::ffi::OsStr| name == "tests" || name == "simulation";
        path.components().any(|part| is_tests(part.as_os_str())) || path.to_string_lossy().ends_with("_tests.rs")
    });
    let tests: String = texts.map(|path| fs::read_to_string(path).expect("a test")).collect();
    let is_expected = |name: &&String| {
        let is_listed = LISTED.iter().any(|(path, begin, end)| {
            let text = read(path);
            let list = text.split(begin).nth(1).and_then(|rest| rest.split(end).next()).expect("a list of marks");
            list.contains(&format!("\"{name}\""))
        });
        is_listed || tests.contains(&format!("marks::expect(\"{name}\")"))
    };
    let unexpected: Vec<_> = marks.iter().filter(|name| !is_expected(name)).collect();
    assert!(unexpected.is_empty(), "no test expects {unexpected:?}");
}

/// The folders of cc/, from the ground up, and those that each includes.
const FOLDERS: [(&str, &[&str]); 10] = [
    ("base", &[]),
    ("work_queue", &["base"]),
    ("tensor", &["base"]),
    ("executor", &["base"]),
    ("graph", &["base", "tensor"]),
    ("worker", &["base", "tensor"]),
    ("rendezvous", &["base", "tensor", "worker"]),
    ("fuse", &["base", "graph", "tensor"]),
    ("star", &["base", "executor", "graph", "rendezvous", "tensor", "worker"]),
    ("server", &["base", "executor", "fuse", "graph", "rendezvous", "star", "tensor", "work_queue", "worker"]),
];

/// What `#include "…"` names, by line.
fn includes(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix('#')?.trim_start().strip_prefix("include")?.split('"').nth(1))
}

#[test]
fn folders_of_the_shim_include_only_what_is_below_them() {
    let mut on_disk = Vec::new();
    for entry in fs::read_dir(root().join("cc")).expect("cc/ is there") {
        let path = entry.expect("cc/ can be listed").path();
        assert!(path.is_dir(), "{}: files of cc/ are in its folders", path.display());
        on_disk.push(path.file_name().expect("a name").to_string_lossy().into_owned());
    }
    on_disk.sort();
    let mut listed = FOLDERS.map(|(folder, _)| folder);
    listed.sort_unstable();
    assert_eq!(on_disk, listed, "FOLDERS lists each folder of cc/");

    let document = read("docs/architecture.md");
    for (at, (folder, allowed)) in FOLDERS.iter().enumerate() {
        let is_below = |name: &&str| FOLDERS[..at].iter().any(|(below, _)| below == name);
        assert!(allowed.iter().all(is_below), "{folder} may only include what is listed above it");
        let mut used = BTreeSet::new();
        for path in ["h", "cc"].iter().flat_map(|extension| files(&format!("cc/{folder}"), extension)) {
            let text = fs::read_to_string(&path).expect("a source");
            for include in includes(&text) {
                let Some(rest) = include.strip_prefix("cc/") else {
                    let folder = path.parent().expect("a folder");
                    let is_ours = folder.join(include).exists() || root().join("cc").join(include).exists();
                    assert!(!is_ours, "{}: {include} is named from the root: cc/…", path.display());
                    continue;
                };
                let other = rest.split_once('/').map_or("", |(other, _)| other);
                let may = other == *folder || allowed.contains(&other);
                assert!(may, "{}: cc/{folder} may not include {include}: move it, or invert it", path.display());
                used.insert(other.to_owned());
            }
        }
        used.remove(*folder);
        assert_eq!(used.iter().collect::<Vec<_>>(), *allowed, "cc/{folder} includes less than it may");
        let names: Vec<String> = allowed.iter().map(|name| format!("`{name}`")).collect();
        let row = document.lines().find(|line| line.starts_with(&format!("| `cc/{folder}/` |")));
        let cell = row.and_then(|row| row.split('|').rev().nth(1)).map(str::trim);
        assert_eq!(cell, Some(names.join(", ").as_str()), "docs/architecture.md, the row of cc/{folder}/");
    }
}

/// Modules that are exempt from `deny(unsafe_code)`; the compiler enforces the rest.
fn exempt() -> Vec<String> {
    let mut found = Vec::new();
    for folder in ["src", "crates", "benches"] {
        // Simulations are tests.
        let is_product = |path: &PathBuf| path.components().all(|part| part.as_os_str() != "simulation");
        for path in files(folder, "rs").into_iter().filter(is_product) {
            let text = fs::read_to_string(&path).expect("a source");
            let home =
                path.parent().expect("a folder").strip_prefix(root()).expect("below the root").display().to_string();
            for (line, next) in text.lines().zip(text.lines().skip(1)) {
                if !line.contains("unsafe_code") || line.trim_start().starts_with("#![") {
                    continue;
                }
                assert_eq!(line.trim(), "#[allow(unsafe_code)]", "{}: write it so that it is counted", path.display());
                let module = next.trim_start_matches("pub ").trim_start_matches("mod ").trim_end_matches(';');
                let folder = format!("{home}/{module}");
                found.push(if root().join(&folder).is_dir() { folder } else { format!("{folder}.rs") });
            }
        }
    }
    found.sort();
    found
}

#[test]
fn unsafe_code_is_confined_to_documented_places() {
    for library in [
        "src/lib.rs",
        "crates/engine/src/lib.rs",
        "crates/net/src/lib.rs",
        "crates/executor/src/lib.rs",
        "crates/marks/src/lib.rs",
        "crates/state/src/lib.rs",
    ] {
        assert!(read(library).contains("#![deny(unsafe_code)]"), "{library}");
    }
    let forbidden = ["crates/protocol/src/lib.rs", "crates/planner/src/lib.rs", "crates/starctl/src/main.rs"];
    for library in forbidden.into_iter().chain(["benches/swarm/src/main.rs"]) {
        assert!(read(library).contains("#![forbid(unsafe_code)]"), "{library}");
    }
    let places = exempt();
    assert!(places.len() > 5, "{places:?}: did the sources move?");
    let (last, rest) = places.split_last().expect("there are some");
    let words = format!("`{}` and `{last}`", rest.join("`, `"));
    for document in ["CONTRIBUTING.md", "SECURITY.md"] {
        assert!(in_one_line(&read(document)).contains(&words), "{document} does not say: {words}");
    }
}

#[test]
fn files_that_documents_name_exist() {
    let mut missing = Vec::new();
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a document");
        for line in text.lines() {
            for word in line.split('`').skip(1).step_by(2) {
                let known = ["src/", "cc/", "crates/", "tests/", "benches/", "scripts/", "fuzz/", "proto/", "include/"];
                let is_plain = !word.contains([' ', '*', '{', '…', '<', ':', '(']);
                if is_plain && known.iter().any(|start| word.starts_with(start)) && !root().join(word).exists() {
                    missing.push(format!("{}: {word}", document.strip_prefix(root()).unwrap_or(&document).display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "no such file:\n{}", missing.join("\n"));
}

/// A line that cannot be broken may be long.
fn is_too_wide(line: &str) -> bool {
    line.chars().count() > 120 && line.split_whitespace().count() > 2
}

#[test]
fn both_builds_leave_the_same_files_out_for_tensorflow_1() {
    let names = |path: &str, from: &str| -> Vec<String> {
        let text = read(path);
        let (_, list) = text.split_once(from).unwrap_or_else(|| panic!("{path} has no {from:?}"));
        let list = &list[..list.find(']').unwrap()];
        list.split('"').filter(|name| name.starts_with("cc/") && !name.contains('*')).map(str::to_owned).collect()
    };
    let cargo = names("build/tensorflow.rs", "const ONLY_TENSORFLOW_2: [&str; 6] = [");
    assert_eq!(cargo.len(), 6);
    assert_eq!(names("BUILD.bazel", "exclude = ["), cargo);
}

#[test]
fn comments_and_documents_wrap_at_120_columns() {
    let mut wide = Vec::new();
    for folder in ["src", "crates", "tests", "benches", "build"] {
        for path in files(folder, "rs") {
            let text = fs::read_to_string(&path).expect("a source");
            let comments = text.lines().enumerate().filter(|(_, line)| line.trim_start().starts_with("//"));
            wide.extend(
                comments.filter(|(_, line)| is_too_wide(line)).map(|(at, _)| format!("{}:{}", path.display(), at + 1)),
            );
        }
    }
    for path in documents() {
        let text = fs::read_to_string(&path).expect("a document");
        let mut in_code = false;
        for (at, line) in text.lines().enumerate() {
            in_code ^= line.trim_start().starts_with("```");
            if !in_code && !line.starts_with('|') && is_too_wide(line) {
                wide.push(format!("{}:{}", path.display(), at + 1));
            }
        }
    }
    assert!(wide.is_empty(), "{} lines are wider than 120 columns:\n{}", wide.len(), wide.join("\n"));
}

#[test]
fn the_changelog_has_the_usual_sections() {
    const SECTIONS: [&str; 6] = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"];
    let text = read("CHANGELOG.md");
    for release in text.split("\n## ").skip(1) {
        let sections: Vec<&str> = release.lines().filter_map(|line| line.strip_prefix("### ")).collect();
        let places = sections.iter().map(|section| SECTIONS.iter().position(|known| known == section));
        assert!(places.clone().all(|place| place.is_some()), "{sections:?}: only {SECTIONS:?}");
        assert!(places.clone().is_sorted_by(|a, b| a < b), "{sections:?}: each once, in the order of {SECTIONS:?}");
        assert!(places.count() > 0, "a release without a section");
    }
}

/// Names of environment variables in a text.
fn starwire_variables(text: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
    let words = text.split(move |c| !is_part(c));
    words.filter(|word| word.starts_with("STARWIRE_") && !word.ends_with('_'))
}

/// Sources of the product; unit tests are at the end of a file.
fn product_sources() -> Vec<(String, String)> {
    let mut found = Vec::new();
    let mut folders: Vec<String> = ["src", "cc", "python/starwire", "python/starwire_run"].map(str::to_owned).into();
    let crates = fs::read_dir(root().join("crates")).expect("crates/ can be listed");
    folders.extend(crates.map(|entry| format!("crates/{}/src", entry.unwrap().file_name().to_string_lossy())));
    for folder in folders {
        for extension in ["rs", "cc", "h", "py"] {
            for path in files(&folder, extension) {
                let text = fs::read_to_string(&path).expect("a source");
                let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default().to_owned();
                found.push((path.strip_prefix(root()).unwrap_or(&path).display().to_string(), text));
            }
        }
    }
    found
}

#[test]
fn only_the_table_of_variables_reads_the_environment() {
    const ALLOWED: [&str; 11] = [
        // The table's reader, and what it uses for the secret.
        "crates/engine/src/config/env.rs",
        "crates/engine/src/system/environment.rs",
        // STARWIRE_SIM_SEED, in a test.
        "crates/engine/src/simulation/mod.rs",
        // FAIL_POINTS, in a build that has them.
        "crates/marks/src/fail_points.rs",
        // STARWIRE_LIBRARY, before there is a library.
        "python/starwire/_library.py",
        // STARWIRE_SECRET, to empty it as the library has.
        "python/starwire/_secret.py",
        // The launcher: STARWIRE_PROTOCOL, STARWIRE_LIBRARY and STARWIRE_TENSOR_FUSE before there is a library;
        // PYTHONPATH, and what terminals and other tools use.
        "python/starwire_run/command.py",
        "python/starwire_run/hook.py",
        "python/starwire_run/output.py",
        "python/starwire_run/protocols.py",
        "python/starwire_run/site/sitecustomize.py",
    ];
    let sources = product_sources();
    assert!(sources.len() > 100, "{}: did the sources move?", sources.len());
    let reads = |text: &str| ["env::var", "getenv", "os.environ", "EnvVar("].iter().any(|call| text.contains(call));
    let readers: Vec<&str> = sources.iter().filter(|(_, text)| reads(text)).map(|(path, _)| path.as_str()).collect();
    let mut allowed = ALLOWED.to_vec();
    allowed.sort_unstable();
    let mut readers = readers;
    readers.sort_unstable();
    assert_eq!(readers, allowed);
}

/// A clock that jumps changes no decision: waits and limits are of the monotonic clock.
#[test]
fn the_wall_clock_is_read_for_logs_names_and_certificates_only() {
    const ALLOWED: [&str; 13] = [
        // How long planning took.
        "cc/fuse/pass.cc",
        "cc/star/pass.cc",
        // Where the numbers in names of nodes begin.
        "cc/graph/names.cc",
        // Times of transfers in the timelines of TensorFlow.
        "cc/rendezvous/recv_call.cc",
        "cc/rendezvous/recv_service.cc",
        "cc/worker/remote_worker.cc",
        "cc/worker/worker.cc",
        // The age of a state, for whoever reads the log.
        "crates/engine/src/star/state.rs",
        "crates/starctl/src/state.rs",
        "crates/state/src/store.rs",
        // Whether a certificate is valid.
        "crates/engine/src/tls/credentials.rs",
        // The first seed of a simulation without an end.
        "crates/engine/src/simulation/mod.rs",
        // The number of a run.
        "crates/starctl/src/bench.rs",
    ];
    let reads = |text: &str| {
        let code = text.lines().filter(|line| !line.trim_start().starts_with("use "));
        let calls =
            ["SystemTime::now", "UnixTime::now", "UNIX_EPOCH.elapsed", "system_clock", "NowMicros", "NowSeconds"];
        let others = ["gettimeofday", "CLOCK_REALTIME", "absl::Now", "time(nullptr", "time.time(", "datetime"];
        code.into_iter().any(|line| calls.iter().chain(&others).any(|call| line.contains(call)))
    };
    let sources = product_sources();
    let mut readers: Vec<&str> =
        sources.iter().filter(|(_, text)| reads(text)).map(|(path, _)| path.as_str()).collect();
    let mut allowed = ALLOWED.to_vec();
    readers.sort_unstable();
    allowed.sort_unstable();
    assert_eq!(readers, allowed);
}

/// Other processes may read this one's memory if the kernel allows that anyway.
#[test]
fn no_protection_of_a_process_is_relaxed() {
    let relaxes = |text: &str| ["PR_SET_PTRACER", "PR_SET_DUMPABLE"].iter().any(|call| text.contains(call));
    let found: Vec<String> = product_sources().into_iter().filter(|(_, text)| relaxes(text)).map(|(p, _)| p).collect();
    assert_eq!(found, Vec::<String>::new());
}

#[test]
fn every_variable_is_mentioned_in_a_test() {
    let mut text = String::new();
    let mut folders: Vec<String> = vec!["tests".to_owned()];
    let crates = fs::read_dir(root().join("crates")).expect("crates/ can be listed");
    folders.extend(crates.map(|entry| format!("crates/{}", entry.unwrap().file_name().to_string_lossy())));
    for extension in ["rs", "py", "cc"] {
        for path in folders.iter().flat_map(|folder| files(folder, extension)) {
            let source = fs::read_to_string(&path).expect("a source");
            let whole = !path.iter().any(|part| part == "src") || path.to_string_lossy().ends_with("tests.rs");
            text += if whole { &source } else { source.split_once("#[cfg(test)]").map_or("", |(_, tests)| tests) };
        }
    }
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words: std::collections::HashSet<&str> = text.split(|c| !is_part(c)).collect();
    let names = starwire_engine::config::VARIABLES.iter().map(|variable| variable.name());
    let missing: Vec<&str> = names.filter(|name| !words.contains(name)).collect();
    assert!(missing.is_empty(), "no test mentions {}", missing.join(", "));
}

#[test]
fn documents_and_messages_name_variables_that_exist() {
    use starwire_engine::config::{FOREIGN_PREFIXES, VARIABLES};
    let exists = |name: &str| {
        VARIABLES.iter().any(|variable| variable.name() == name)
            || FOREIGN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
    };
    let mut unknown = Vec::new();
    for path in documents().into_iter().chain(files("examples", "md")) {
        let text = fs::read_to_string(&path).expect("a document");
        // The log of changes names what is gone.
        let names = starwire_variables(&text).filter(|name| !path.ends_with("CHANGELOG.md") && !exists(name));
        unknown.extend(names.map(|name| format!("{}: {name}", path.display())));
    }
    // In C++, names in capital letters are include guards and macros as well.
    let is_rust = |(path, _): &&(String, String)| path.ends_with(".rs");
    for (path, text) in product_sources().iter().filter(is_rust).filter(|(path, _)| !path.ends_with("tests.rs")) {
        unknown.extend(starwire_variables(text).filter(|name| !exists(name)).map(|name| format!("{path}: {name}")));
    }
    assert!(unknown.is_empty(), "no such variable:\n{}", unknown.join("\n"));
}

/// Lines of the longest block of braces in formatted code, apart from those that declare things, and where it begins.
fn longest_block(path: &str, text: &str) -> (usize, usize) {
    const DECLARE: [&str; 12] = [
        " class ",
        " struct ",
        " namespace ",
        " enum ",
        " union ",
        " impl",
        " trait ",
        " mod ",
        " extern \"C\" {",
        " variables! ",
        " metrics! ",
        " #define ",
    ];
    let (mut longest, mut open, mut alternatives) = ((0, 0), Vec::new(), Vec::new());
    let mut in_macro = false;
    for (at, line) in text.lines().enumerate() {
        let line = line.trim();
        let was_in_macro = std::mem::replace(&mut in_macro, line.ends_with('\\'));
        // One block may begin in several ways, for several versions of TensorFlow.
        match line.split_whitespace().next() {
            Some("#if" | "#ifdef" | "#ifndef") => alternatives.push(open.clone()),
            Some("#else" | "#elif") => open.clone_from(alternatives.last().expect("an #if of this file")),
            Some("#endif") => drop(alternatives.pop().expect("an #if of this file")),
            _ => (),
        }
        if line.starts_with("//") || in_macro || was_in_macro {
            continue;
        }
        if line.starts_with('}') {
            let (begin, is_code) = open.pop().unwrap_or_else(|| panic!("{path}:{}: closes no block", at + 1));
            if is_code && at + 1 - begin > longest.0 {
                longest = (at + 1 - begin, begin + 1);
            }
        }
        if line.split(" // ").next().is_some_and(|code| code.trim_end().ends_with('{')) {
            let declares = DECLARE.iter().any(|word| format!(" {line}").contains(word));
            let is_code = line.contains("fn ") || !declares;
            open.push((at, is_code));
        }
    }
    assert!(open.is_empty(), "{path}:{}: a block without end", open[0].0 + 1);
    longest
}

/// A function that does not fit on two screens does too much.
#[test]
fn functions_have_at_most_a_hundred_lines() {
    let mut long = Vec::new();
    for (path, text) in product_sources() {
        if path.ends_with(".py") || path.contains("_tests") {
            continue;
        }
        let (lines, begin) = longest_block(&path, &text);
        if lines > 100 {
            long.push(format!("{path}:{begin}: {lines} lines"));
        }
    }
    assert!(long.is_empty(), "{}", long.join("\n"));
    let longest = longest_block("example", &format!("fn f() {{\n{}}}\n", "x();\n".repeat(100)));
    assert_eq!(longest, (102, 1));
}

/// The names of the protocols are text at the borders: in `ServerDef`, and in Python before there is a library.
#[test]
fn all_lists_of_protocols_are_the_same() {
    let quoted = |path: &str, from: &str, to: &str| -> Vec<String> {
        let text = read(path);
        let (_, list) = text.split_once(from).unwrap_or_else(|| panic!("{path} has no {from:?}"));
        let mut names: Vec<String> =
            list[..list.find(to).unwrap()].split('"').skip(1).step_by(2).map(str::to_owned).collect();
        names.sort();
        names
    };
    let mut ours: Vec<_> = Protocol::ALL.into_iter().filter(|one| *one != Protocol::Grpc).map(Protocol::name).collect();
    ours.sort_unstable();
    assert_eq!(quoted("python/starwire_run/protocols.py", "OURS = (", ")"), ours);
    let of_factories = quoted("cc/server/server.cc", "kProtocols[] = {", "};");
    let names: Vec<_> = of_factories.into_iter().filter(|name| !name.starts_with("STARWIRE_")).collect();
    let mut all = quoted("python/starwire_run/protocols.py", "OTHERS = (", ")");
    all.extend(ours.iter().map(|name| (*name).to_owned()));
    all.sort();
    assert_eq!(names, all);
    let missing = quoted("cc/server/server.cc", "kMissingProtocols[] = {", "};");
    let known = quoted("python/starwire_run/protocols.py", "MISSING = {", "}");
    let is_name = |text: &&String| !text.contains(' ') && !ours.contains(&text.as_str());
    assert!(missing.iter().filter(is_name).eq(known.iter().filter(is_name)), "{missing:?} {known:?}");
    let mut stars: Vec<_> = Protocol::ALL.into_iter().filter(|one| one.is_star()).map(Protocol::name).collect();
    stars.sort_unstable();
    assert_eq!(quoted("cc/star/switch.cc", "const char* NameOf(", "}"), stars);
}

/// What several files of tests need is in a module beside them. A test that another file imports would run twice.
#[test]
fn files_of_python_tests_import_no_tests() {
    let is_of_tests = |name: &str| name.starts_with("test_");
    let mut found = Vec::new();
    for path in files("tests", "py") {
        if !path.file_name().is_some_and(|name| is_of_tests(&name.to_string_lossy())) {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source");
        for (at, line) in text.lines().enumerate() {
            let line = line.trim_start();
            let names = line.strip_prefix("import ").or_else(|| line.strip_prefix("from "));
            if names.is_some_and(|names| names.split([' ', ',', '.', '(']).any(is_of_tests)) {
                found.push(format!("{}:{}: {line}", path.display(), at + 1));
            }
        }
    }
    assert!(found.is_empty(), "move what they share into a module beside them:\n{}", found.join("\n"));
}
