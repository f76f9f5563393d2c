//! Generated tables in the documentation match the code (`UPDATE=1 cargo test --test docs` rewrites them), and links
//! and file names in it exist.

#![allow(clippy::unwrap_used, reason = "a test may panic, and its numbers are small")]

use std::collections::HashSet;
use std::path::{Path, PathBuf};

use starwire_protocol::{Field, LAYOUTS, Layout, Sender};

const END: &str = "<!-- end of generated table -->";

fn check(file: &str, begin: &str, table: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let text = std::fs::read_to_string(&path).unwrap();
    let after_begin = text.find(begin).map(|at| at + begin.len()).unwrap_or_else(|| panic!("{file} has no {begin}"));
    let end = after_begin + text[after_begin..].find(END).unwrap_or_else(|| panic!("{file} has no {END}"));
    let current = format!("{}\n{table}{}", &text[..after_begin], &text[end..]);
    if text == current {
        return;
    }
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, current).unwrap();
    } else {
        panic!("{file} is out of date: run UPDATE=1 cargo test --test docs");
    }
}

#[test]
fn configuration() {
    let begin = "<!-- generated from crates/engine/src/config/variables.rs: `UPDATE=1 cargo test --test docs` -->";
    check("docs/configuration.md", begin, &starwire_engine::config::variables_markdown());
}

#[test]
fn metrics() {
    let begin = "<!-- generated from crates/engine/src/metrics/list.rs: `UPDATE=1 cargo test --test docs` -->";
    check("docs/metrics.md", begin, &starwire_engine::metrics::markdown_table());
}

#[test]
fn limits_of_the_protocol() {
    let begin = "<!-- generated from crates/protocol/src/limits.rs: `UPDATE=1 cargo test --test docs` -->";
    check("docs/protocol.md", begin, &starwire_protocol::limits::markdown_table());
}

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in [".", "deploy", "deploy/kubernetes", "docs", "examples", "fuzz", "bazel", "benches/swarm"] {
        let entries = std::fs::read_dir(root.join(folder)).unwrap();
        files.extend(
            entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|e| e == "md")),
        );
    }
    assert!(files.len() > 10);
    files
}

/// Code blocks begin and end on lines of their own; wrapping a document must not join them with text.
#[test]
fn code_blocks() {
    for file in documents() {
        let text = std::fs::read_to_string(&file).unwrap();
        let fences = text.lines().filter(|line| line.contains("```"));
        let fences: Vec<&str> = fences.map(str::trim_start).collect();
        let joined = fences.iter().find(|fence| !fence.starts_with("```") || fence[3..].contains([' ', '`']));
        assert_eq!(joined, None, "{}: a code block is joined with text", file.display());
        assert!(fences.len() % 2 == 0, "{}: a code block does not end", file.display());
    }
}

/// Checks links to files of the repository and file names in backticks.
#[test]
fn links_and_file_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut dead = Vec::new();
    for file in documents() {
        let text = std::fs::read_to_string(&file).unwrap();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let links = links.filter(|link| !link.contains("://") && !link.starts_with('#'));
        let here = file.parent().unwrap();
        let linked = links.map(|link| here.join(link.split('#').next().unwrap_or_default()));
        let top = [
            "src/",
            "cc/",
            "tests/",
            "deploy/",
            "docs/",
            "build/",
            "scripts/",
            "examples/",
            "benches/",
            "python/",
            "proto/",
            "include/",
        ];
        let named = text.split('`').skip(1).step_by(2).filter(|name| {
            top.iter().any(|top| name.starts_with(top))
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"/._-".contains(&b))
        });
        let all: Vec<PathBuf> = linked.chain(named.map(|name| root.join(name))).collect();
        dead.extend(
            all.into_iter().filter(|path| !path.exists()).map(|path| format!("{}: {}", file.display(), path.display())),
        );
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

/// The anchors that GitHub and mkdocs make of headings.
fn anchors(text: &str) -> Vec<String> {
    let mut in_code = false;
    let mut found: Vec<String> = Vec::new();
    for line in text.lines() {
        in_code ^= line.trim_start().starts_with("```");
        let Some(heading) = line.strip_prefix('#').filter(|_| !in_code) else { continue };
        let heading = heading.trim_start_matches('#').trim();
        // Of a link, its text.
        let (mut plain, mut rest) = (String::new(), heading);
        while let Some((before, (label, after))) = rest.split_once('[').and_then(|(before, inner)| {
            Some((before, inner.split_once("](").and_then(|(l, r)| Some((l, r.split_once(')')?.1)))?))
        }) {
            plain = plain + before + label;
            rest = after;
        }
        plain += rest;
        let kept =
            plain.to_lowercase().chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c)).collect::<String>();
        found.push(kept.replace(' ', "-"));
    }
    found
}

#[test]
fn anchors_of_links_exist() {
    let mut dead = Vec::new();
    for file in documents() {
        let text = std::fs::read_to_string(&file).unwrap();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for (target, anchor) in links.filter(|link| !link.contains("://")).filter_map(|link| link.split_once('#')) {
            let path = if target.is_empty() { file.clone() } else { file.parent().unwrap().join(target) };
            let there = std::fs::read_to_string(&path).is_ok_and(|text| anchors(&text).iter().any(|a| a == anchor));
            if !there {
                dead.push(format!("{}: {target}#{anchor}", file.display()));
            }
        }
    }
    assert!(dead.is_empty(), "{}", dead.join("\n"));
}

/// The navigation of the site (`make docs`) has every document of docs/, and no other file.
#[test]
fn the_site_shows_every_document() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(root.join("mkdocs.yml")).unwrap();
    let listed: Vec<&str> = text.lines().filter_map(|line| line.rsplit_once(": ")).map(|(_, path)| path).collect();
    let pages: Vec<&str> = listed.into_iter().filter(|path| path.ends_with(".md")).collect();
    for page in &pages {
        assert!(root.join(page).exists(), "mkdocs.yml lists {page}, which does not exist");
    }
    for entry in std::fs::read_dir(root.join("docs")).unwrap() {
        let name = entry.unwrap().file_name().to_string_lossy().into_owned();
        assert!(
            !name.ends_with(".md") || pages.contains(&format!("docs/{name}").as_str()),
            "mkdocs.yml lacks docs/{name}"
        );
    }
}

/// Rows of the tables in `docs/protocol.md`, with trimmed cells.
fn protocol_rows() -> Vec<Vec<String>> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/protocol.md")).unwrap();
    let rows = text.lines().filter(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split('|').map(|cell| cell.trim().to_owned()).collect()).collect()
}

/// Names and values that a source file defines as `prefix NAME … = value`, up to `suffix`.
fn constants(file: &str, between: (&str, &str), prefix: &str, suffix: char) -> Vec<(String, u64)> {
    let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let from = text.find(between.0).unwrap_or_else(|| panic!("{file} has no {}", between.0));
    let to = from + text[from..].find(between.1).unwrap_or_else(|| panic!("{file} has no {}", between.1));
    let value = |text: &str| {
        let mut numbers = text.split("<<").map(|number| number.trim().parse::<u64>().unwrap());
        numbers.next().unwrap() << numbers.next().unwrap_or(0)
    };
    let lines = text[from..to].lines().filter_map(|line| line.trim().strip_prefix(prefix)?.split_once('='));
    lines
        .map(|(name, rest)| {
            let name = name.split(':').next().unwrap().trim().to_owned();
            (name, value(rest.split(suffix).next().unwrap()))
        })
        .collect()
}

/// Whether the cell says the same of a fixed part as the code, apart from what follows the fields.
fn fixed_part(layout: &Layout, cell: &str) -> bool {
    let mut fields = String::new();
    for field in layout.fixed {
        let (name, number) = match field {
            Field::U32(name) => (*name, "u32"),
            Field::I64(name) => (*name, "i64"),
            Field::U64(name) | Field::Flagged(name) => (*name, "u64"),
            Field::Zero => ("0", "u32"),
            Field::Parts => ("part count", "u32"),
            Field::Pieces => ("number of pieces", "u64"),
        };
        let condition = match field {
            Field::Flagged(_) if !fields.contains("if flags") => "and if flags & 1: ",
            _ => "",
        };
        let comma = if fields.is_empty() { "" } else { ", " };
        fields += &format!("{comma}{condition}{name} {number}");
    }
    match layout.fixed {
        [] => layout.name == "PAD" || cell == "–",
        _ => cell.starts_with(&fields),
    }
}

/// What a row of the table of frames must say: the columns are kind, name, sender, id, code, fixed part, metadata.
fn is_row_of(layout: &Layout, row: &[String]) -> bool {
    let sender = match layout.sender {
        Sender::Client => "client",
        Sender::Server => "server",
        Sender::Both => "both",
    };
    let meta = match layout.max_meta {
        0 => row[6] == "–" || layout.name == "PAD",
        starwire_protocol::limits::MAX_META => row[6].contains("metadata") || row[6].contains("fields"),
        bytes if bytes < 1024 => row[6].contains(&format!("{bytes} bytes")),
        bytes => row[6].contains(&format!("at most {} KiB", bytes >> 10)),
    };
    let is_unused = |cell: &str| cell == "0" || cell.is_empty();
    fixed_part(layout, &row[5])
        && row[0] == layout.kind.to_string()
        && row[1] == layout.name
        && row[2] == sender
        && is_unused(&row[3]) != layout.uses_id
        && is_unused(&row[4]) != layout.uses_code
        && row.iter().any(|cell| cell.contains("flags & 1")) == (layout.flags != 0)
        && meta
}

#[test]
fn the_protocol_describes_every_frame() {
    let rows = protocol_rows();
    let frames: Vec<_> = rows.iter().filter(|row| row.len() == 7 && row[0].parse::<u8>().is_ok()).collect();
    assert_eq!(frames.len(), LAYOUTS.len());
    for (layout, row) in LAYOUTS.iter().zip(frames) {
        assert!(is_row_of(layout, row), "docs/protocol.md says {row:?}, the code {layout:?}");
    }
}

/// Authors of other clients need every number of the wire format.
#[test]
fn the_protocol_names_every_number_of_the_code() {
    let rows = protocol_rows();
    let has = |first: &str, second: &str| rows.iter().any(|row| row[0] == first && row[1] == second);
    let mut missing = Vec::new();
    let methods = constants("cc/base/methods.h", ("enum class Method", "};"), "k", ',');
    assert!(methods.len() >= 18, "{methods:?}");
    for (name, number) in &methods {
        if !has(&number.to_string(), name) {
            missing.push(format!("| {number} | {name} |"));
        }
    }
    for (name, number) in constants("crates/protocol/src/hello.rs", ("mod tag {", "\n}"), "pub const ", ';') {
        let row = rows.iter().find(|row| row[0] == number.to_string() && row.len() == 3 && !row[2].is_empty());
        if row.is_none() && name != "HAS_SECRET" {
            missing.push(format!("field {number}, {name}"));
        }
    }
    for (feature, word) in [
        ("FEATURE_QUEUE_PAIRS", "1 (the lowest) = *queue pairs*"),
        ("FEATURE_LENDING", "2 = *lending*"),
        ("FEATURE_DIGESTS", "4 = *digests*"),
    ] {
        let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/protocol.md")).unwrap();
        if !text.contains(word) {
            missing.push(feature.to_owned());
        }
    }
    assert!(missing.is_empty(), "not in docs/protocol.md:\n{}", missing.join("\n"));
}

/// Every promise in the document has a test that carries its number.
#[test]
fn every_promise_of_the_protocol_has_a_test() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/protocol/tests/sim");
    let entries = std::fs::read_dir(root).unwrap();
    let sources: String = entries.map(|entry| std::fs::read_to_string(entry.unwrap().path()).unwrap()).collect();
    let rows = protocol_rows();
    let promises = rows.iter().filter(|row| row.len() == 3);
    let numbers: Vec<u32> = promises.filter_map(|row| row[0].strip_prefix('P')?.parse().ok()).collect();
    assert!(numbers.len() >= 36 && numbers.iter().zip(1..).all(|(found, number)| *found == number), "{numbers:?}");
    for number in numbers {
        assert!(sources.contains(&format!("fn p{number:02}_")), "P{number} has no test");
    }
}

/// The names of the tests in a source: functions of Rust below `#[test]`, and those of which a macro makes tests, of
/// Python that begin with `test_`, gtests.
fn tests_in(path: &Path, text: &str) -> Vec<String> {
    let ends_with = |end: &str| path.extension().is_some_and(|e| e == end);
    let is_name = |word: &&str| word.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'_');
    let has_macro = text.contains("#[test] fn $test()");
    let (mut names, mut is_test) = (Vec::new(), false);
    for line in text.lines() {
        let code = line.trim_start();
        if ends_with("rs") {
            let function = code.split_once("fn ").filter(|_| is_test).and_then(|(_, rest)| rest.split_once('('));
            names.extend(function.map(|(name, _)| name.to_owned()));
            names.extend(code.strip_suffix(',').filter(is_name).filter(|_| has_macro).map(str::to_owned));
            let begins = ["#[test]", "#[tokio::test]"].contains(&code);
            is_test = begins || is_test && (code.starts_with("#[") || code.starts_with("//"));
        } else if ends_with("py") {
            let function = code.strip_prefix("def ").filter(|rest| rest.starts_with("test_"));
            names.extend(function.and_then(|rest| Some(rest.split_once('(')?.0.to_owned())));
        } else if ends_with("cc") {
            let gtest = line.strip_prefix("TEST").and_then(|rest| rest.split_once('(')?.1.split_once(')'));
            if let Some((suite, name)) = gtest.and_then(|(both, _)| both.split_once(", ")) {
                names.extend([name.to_owned(), format!("{suite}.{name}")]);
            }
        }
    }
    names
}

/// The names of all tests in a folder.
fn tests_below(folder: &Path, names: &mut HashSet<String>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            tests_below(&path, names);
        } else if let Ok(text) = std::fs::read_to_string(&path) {
            names.extend(tests_in(&path, &text));
        }
    }
}

/// The words between backticks, without the parameters of tests.
fn quoted(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2).map(|word| word.split('[').next().unwrap_or(word))
}

/// The last cells of all tables whose last column is for tests.
fn cells_with_tests(text: &str) -> Vec<&str> {
    let mut cells = Vec::new();
    let mut has_tests = None;
    for line in text.lines() {
        let Some(row) = line.strip_prefix('|').and_then(|row| row.trim_end().strip_suffix('|')) else {
            has_tests = None;
            continue;
        };
        let last = row.rsplit('|').next().unwrap().trim();
        if *has_tests.get_or_insert(last == "test" || last == "tests") && !last.starts_with("---") {
            cells.push(last);
        }
    }
    cells.retain(|cell| *cell != "test" && *cell != "tests");
    cells
}

/// The content of the outermost parentheses.
fn parentheses(text: &str) -> Vec<&str> {
    let (mut found, mut depth, mut begin, mut in_code) = (Vec::new(), 0, 0, false);
    for (at, c) in text.char_indices() {
        match c {
            '`' => in_code = !in_code,
            '(' if !in_code => {
                depth += 1;
                begin = if depth == 1 { at + 1 } else { begin };
            }
            ')' if !in_code => {
                depth -= 1;
                found.extend((depth == 0).then(|| &text[begin..at]));
            }
            _ => (),
        }
    }
    assert_eq!(depth, 0, "a parenthesis is not closed");
    found
}

/// What holds a promise: tests by their name or its beginning, files, or a place in the code.
struct Proofs {
    known: HashSet<String>,
}

impl Proofs {
    fn new() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut known = HashSet::new();
        ["crates", "src", "tests"].iter().for_each(|folder| tests_below(&root.join(folder), &mut known));
        Self { known }
    }

    fn exists(&self, word: &str) -> bool {
        match word.strip_suffix('…') {
            Some(begin) => begin.len() >= 4 && self.known.iter().any(|name| name.starts_with(begin)),
            None if word.contains('/') => Path::new(env!("CARGO_MANIFEST_DIR")).join(word).exists(),
            None => self.known.contains(word),
        }
    }

    /// "by construction: `this`, `that` in `file`".
    fn is_in_the_code(words: &str) -> bool {
        let mut words: Vec<&str> = words.split('`').skip(1).step_by(2).collect();
        let Some(file) = words.pop() else { return false };
        let text = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file));
        !words.is_empty() && text.is_ok_and(|text| words.iter().all(|word| text.contains(word)))
    }

    /// Why a cell proves nothing.
    fn fault(&self, cell: &str) -> Option<String> {
        if let Some(words) = cell.strip_prefix("by construction: ") {
            return (!Self::is_in_the_code(words)).then(|| cell.to_owned());
        }
        let is_proof = |item: &&str| match item.strip_prefix('`').and_then(|item| item.strip_suffix('`')) {
            Some(word) => self.exists(word),
            None => ["simulation", "simulations", "fuzz"].contains(item),
        };
        cell.split(", ").find(|item| !is_proof(item)).map(|item| format!("{item:?} of {cell:?}"))
    }
}

#[test]
fn tests_that_documents_name_exist() {
    let proofs = Proofs::new();
    let read = |file: &str| std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
    let (security, record) = (read("SECURITY.md"), read("docs/record.md"));
    let mut faults = Vec::new();
    for (file, least) in [("SECURITY.md", 70), ("docs/protocol.md", 60), ("docs/troubleshooting.md", 40)] {
        let text = read(file);
        let cells = cells_with_tests(&text);
        assert!(cells.len() >= least, "{file}: only {} rows with tests", cells.len());
        faults.extend(cells.into_iter().filter_map(|cell| proofs.fault(cell)).map(|fault| format!("{file}: {fault}")));
    }
    // In prose, parentheses have the tests, apart from these.
    let others = ["SO_PEERCRED", "process_vm_readv", "starctl secret", "GET /metrics", "deny.toml"];
    let prose = security.lines().filter(|line| !line.starts_with('|')).collect::<Vec<_>>().join(" ");
    for inner in parentheses(&prose) {
        let is_found = match inner.strip_prefix("by construction: ") {
            Some(words) => Proofs::is_in_the_code(words),
            None => quoted(inner).all(|word| others.contains(&word) || proofs.exists(word)),
        };
        faults.extend((!is_found).then(|| format!("SECURITY.md: ({inner})")));
    }
    let rows = record.lines().filter(|line| line.starts_with("| ") && line.matches(" | ").count() == 4);
    let last = rows.filter_map(|row| row.rsplit(" | ").next());
    let is_commit = |word: &str| word.len() == 7 && word.chars().all(|c| c.is_ascii_hexdigit());
    let names: Vec<&str> = last.flat_map(quoted).filter(|word| !is_commit(word)).collect();
    assert!(names.len() > 100, "{}", names.len());
    faults.extend(names.into_iter().filter(|name| !proofs.exists(name)).map(|name| format!("docs/record.md: {name}")));
    assert!(faults.is_empty(), "no such tests:\n{}", faults.join("\n"));
}

#[test]
fn a_promise_without_a_test_is_noticed() {
    let proofs = Proofs::new();
    let table = "| promise | test |\n|---|---|\n| a | `p01_…` |\n| b | |\n\n| not | checked |\n|---|---|\n| c | |\n";
    assert_eq!(cells_with_tests(table), ["`p01_…`", ""]);
    let good = [
        "`p01_…`, simulation",
        "`tests_that_documents_name_exist`, `tests/docs.rs`",
        "by construction: `fn x` in `tests/docs.rs`",
    ];
    assert_eq!(good.map(|cell| proofs.fault(cell)), [const { None }; 3]);
    let nothing = "by construction: `tests/docs.rs`";
    for bad in ["", "later", "`p99_…`", "`t…`", "`no_such_test`", "`tests/none.rs`, fuzz", "`p01_…`,", nothing] {
        assert!(proofs.fault(bad).is_some(), "{bad}");
    }
    assert_eq!(parentheses("a (b (c) `)`) d (e)"), ["b (c) `)`", "e"]);
}

#[test]
fn a_name_counts_only_if_it_is_that_of_a_test() {
    let names = |file: &str, text: &str| tests_in(Path::new(file), text);
    let rust =
        "#[test]\n#[ignore = \"slow\"]\nfn slow() {\n    let list = [\n        word,\n    ];\n}\nfn helper() {}\n";
    assert_eq!(names("a.rs", rust), ["slow"]);
    let made = "    $(#[test] fn $test() { $test(driver()) })*\npromises! {\n    it_ends,\n}\n";
    assert_eq!(names("main.rs", made), ["it_ends"]);
    assert_eq!(names("a.rs", "    #[tokio::test]\n    async fn waits() {\n    }\n"), ["waits"]);
    assert_eq!(names("a.py", "def helper():\n    pass\n\ndef test_it(cluster):\n    pass\n"), ["test_it"]);
    assert_eq!(names("a.cc", "TEST_F(Suite, It) {\nvoid Helper() {\n"), ["It", "Suite.It"]);
    assert!(names("a.md", "#[test]\nfn no_code() {").is_empty());
    assert!(!Proofs::new().exists("tests_below"), "it is a function");
}

#[test]
fn the_record_counts_its_rows() {
    let record = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/record.md")).unwrap();
    let cells = |row: &str| row.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect::<Vec<_>>();
    let (counts, kinds) = record.split_once("\n## ").unwrap();
    let mut of_all = [0; 6];
    for kind in kinds.split("\n## ") {
        let title = kind.lines().next().unwrap();
        let rows: Vec<_> = kind.lines().filter(|line| line.starts_with("| ")).skip(1).map(cells).collect();
        let by = |who: &str| rows.iter().filter(|row| row[1] == who).count();
        let found = [by("test"), by("fuzzer"), by("review"), by("attack"), by("user"), rows.len()];
        assert_eq!(found[..5].iter().sum::<usize>(), rows.len(), "{title}: somebody else noticed a defect");
        let row = counts.lines().find(|line| line.starts_with(&format!("| [{title}]"))).expect(title);
        assert_eq!(cells(row)[1..], found.map(|n| n.to_string()), "{title}");
        found.iter().zip(&mut of_all).for_each(|(n, all)| *all += n);
    }
    let last = counts.lines().find(|line| line.starts_with("| **all**")).unwrap();
    assert_eq!(cells(last)[1..], of_all.map(|n| n.to_string()));
}
