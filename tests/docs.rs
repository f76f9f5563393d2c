//! The tables in the documentation say what the code says (`UPDATE=1 cargo test --test docs` rewrites them), and its links and file names lead somewhere.

use std::path::{Path, PathBuf};

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
    let begin = "<!-- generated from src/config/variables.rs: `UPDATE=1 cargo test --test docs` -->";
    check("docs/configuration.md", begin, &starwire::config::variables_markdown());
}

#[test]
fn metrics() {
    let begin = "<!-- generated from src/metrics/list.rs: `UPDATE=1 cargo test --test docs` -->";
    check("docs/metrics.md", begin, &starwire::metrics::markdown_table());
}

/// Links to files of the project, and names of files of the project between backquotes.
#[test]
fn links_and_file_names() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    for folder in [".", "docs", "examples", "fuzz", "bazel"] {
        let entries = std::fs::read_dir(root.join(folder)).unwrap();
        files.extend(
            entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|e| e == "md")),
        );
    }
    assert!(files.len() > 10);
    let mut dead = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let links = links.filter(|link| !link.contains("://") && !link.starts_with('#'));
        let here = file.parent().unwrap();
        let linked = links.map(|link| here.join(link.split('#').next().unwrap_or_default()));
        let top = [
            "src/",
            "cc/",
            "tests/",
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
