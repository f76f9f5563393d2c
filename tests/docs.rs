//! The tables in the documentation say what the code says. `UPDATE=1 cargo test --test docs` rewrites them.

use std::path::Path;

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
