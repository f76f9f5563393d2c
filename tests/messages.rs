//! Every message that an operator can see is listed in `docs/troubleshooting.md`.

use std::fs;
use std::path::{Path, PathBuf};

/// The text between the placeholders of a message, in order.
type Fragments = Vec<String>;

#[test]
fn rust_errors_are_documented() {
    check(&["src", "crates"], "rs", rust_messages, 50);
}

#[test]
fn cpp_errors_are_documented() {
    check(&["cc"], "cc", cpp_messages, 20);
}

#[test]
fn rust_lines_are_documented() {
    check(&["src", "crates"], "rs", rust_lines, 40);
}

#[test]
fn python_errors_are_documented() {
    check(&["python/starwire"], "py", python_errors, 10);
}

/// `least`: there must be more messages than that.
fn check(folders: &[&str], extension: &str, extract: fn(&str) -> Vec<Fragments>, least: usize) {
    let messages: Vec<_> = folders.iter().flat_map(|folder| messages(folder, extension, extract)).collect();
    assert!(messages.len() > least, "only {} messages found: did the sources move?", messages.len());
    let text = read(Path::new("docs/troubleshooting.md"));
    // A documented message is the text in backticks.
    let documented: Vec<&str> = text.lines().flat_map(|line| line.split('`').skip(1).step_by(2)).collect();
    let missing: Vec<String> = messages
        .iter()
        .filter(|(_, fragments)| !documented.iter().any(|entry| contains_in_order(entry, fragments)))
        .map(|(file, fragments)| format!("{}: {}", file.display(), fragments.join("…")))
        .collect();
    assert!(missing.is_empty(), "not in docs/troubleshooting.md:\n{}", missing.join("\n"));
}

fn contains_in_order(entry: &str, fragments: &[String]) -> bool {
    let mut rest = entry;
    fragments.iter().all(|fragment| match rest.find(fragment.as_str()) {
        Some(at) => {
            rest = &rest[at + fragment.len()..];
            true
        }
        None => false,
    })
}

fn messages(folder: &str, extension: &str, extract: fn(&str) -> Vec<Fragments>) -> Vec<(PathBuf, Fragments)> {
    let mut found = Vec::new();
    for file in files(Path::new(folder), extension) {
        let text = read(&file);
        for fragments in extract(&text) {
            // A message without its own text only passes another one on.
            if fragments.iter().map(String::len).sum::<usize>() >= 10 {
                found.push((file.clone(), fragments));
            }
        }
    }
    found
}

/// Extracts the texts of `#[error("…")]`.
fn rust_messages(text: &str) -> Vec<Fragments> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let after = code.split("#[error(").skip(1);
    let literals = after.filter_map(|rest| literal(rest.trim_start()).map(|(text, _)| text));
    literals.map(|text| split_placeholders(&text)).collect()
}

/// Extracts what other literals that begin with `starwire: ` say before their first placeholder. Those of two kinds
/// differ only in where the bug is, and are documented as one.
fn rust_lines(text: &str) -> Vec<Fragments> {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let mut found = Vec::new();
    for (at, _) in code.match_indices("\"starwire: ") {
        let line = code[..at].rsplit('\n').next().unwrap_or_default();
        let Some((text, _)) = literal(&code[at..]).filter(|_| !line.trim_start().starts_with("//")) else { continue };
        // Documents have no backticks within messages.
        let text = text.split('`').next().unwrap_or_default();
        let Some(first) = split_placeholders(text).into_iter().next() else { continue };
        let kind =
            ["starwire: internal error while", "starwire: bug:"].into_iter().find(|kind| first.starts_with(kind));
        found.push(vec![kind.map_or(first, str::to_owned)]);
    }
    found
}

/// Extracts the texts of `raise …Error(f"…")`.
fn python_errors(text: &str) -> Vec<Fragments> {
    let raised = text.split("raise ").skip(1).filter_map(|rest| rest.split_once("Error("));
    let literals = raised.filter_map(|(_, rest)| literal(rest.strip_prefix('f').unwrap_or(rest)).map(|(text, _)| text));
    literals.map(|text| split_placeholders(&text)).collect()
}

/// Extracts the texts of `MakeStatus(code, "…" + …)`.
fn cpp_messages(text: &str) -> Vec<Fragments> {
    let mut found = Vec::new();
    for call in text.split("MakeStatus(").skip(1) {
        let mut fragments = Vec::new();
        let (mut depth, mut rest) = (1, call);
        while depth > 0 && !rest.is_empty() {
            if let Some((text, after)) = literal(rest) {
                fragments.push(text.trim().to_string());
                rest = after;
                continue;
            }
            match rest.as_bytes()[0] {
                b'(' => depth += 1,
                b')' => depth -= 1,
                _ => {}
            }
            let next = rest.char_indices().nth(1).map_or(rest.len(), |(at, _)| at);
            rest = &rest[next..];
        }
        fragments.retain(|fragment| fragment.len() > 1);
        found.push(fragments);
    }
    found
}

/// Parses a string literal at the start of `text`; returns its unescaped value and the rest.
fn literal(text: &str) -> Option<(String, &str)> {
    let body = text.strip_prefix('"')?;
    let mut out = String::new();
    let mut chars = body.char_indices();
    while let Some((at, c)) = chars.next() {
        match c {
            '"' => return Some((out, &body[at + 1..])),
            '\\' => match chars.next()?.1 {
                'n' => out.push('\n'),
                // A continued line: its indentation is not part of the text.
                '\n' => {
                    let rest = chars.as_str();
                    let skipped = rest.len() - rest.trim_start().len();
                    for _ in 0..rest[..skipped].chars().count() {
                        chars.next();
                    }
                }
                other => out.push(other),
            },
            _ => out.push(c),
        }
    }
    None
}

fn split_placeholders(text: &str) -> Fragments {
    let mut fragments = vec![String::new()];
    let mut depth = 0;
    for c in text.chars() {
        match c {
            '{' => {
                depth += 1;
                fragments.push(String::new());
            }
            '}' => depth -= 1,
            _ if depth == 0 => fragments.last_mut().expect("there is one").push(c),
            _ => {}
        }
    }
    let trimmed = fragments.into_iter().map(|fragment| fragment.trim().to_string());
    trimmed.filter(|fragment| !fragment.is_empty()).collect()
}

fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    for entry in fs::read_dir(&root).unwrap_or_else(|error| panic!("{}: {error}", root.display())) {
        let path = entry.expect("the folder can be listed").path();
        let name = path.file_name().map(|name| name.to_string_lossy().to_string()).unwrap_or_default();
        let relative = folder.join(&name);
        if path.is_dir() {
            found.extend(files(&relative, extension));
        } else if path.extension().is_some_and(|found| found == extension) && !name.contains("test") {
            found.push(relative);
        }
    }
    found.sort();
    found
}

fn read(file: &Path) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn an_undocumented_message_is_noticed() {
    let fragments = rust_messages("#[error(\"never {written} down anywhere\")]").remove(0);
    assert_eq!(fragments, ["never", "down anywhere"]);
    assert!(!contains_in_order("something else", &fragments));
    assert_eq!(rust_lines("log(\"starwire: never {written} down\")"), [["starwire: never"]]);
    assert_eq!(rust_lines("// like \"starwire: never {written} down\""), Vec::<Fragments>::new());
    assert_eq!(python_errors("raise ValueError(f\"never {written} down\")"), [["never", "down"]]);
    let fragments = cpp_messages("MakeStatus(3, \"a \\\"thing\\\" of \" + F(x, \"y\") + \" bytes\");").remove(0);
    assert_eq!(fragments, ["a \"thing\" of", "bytes"]);
}
