//! docs/troubleshooting.md knows every message that the sources can raise.

use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

/// The string literal that begins at `text[0] == '"'`, with line continuations removed.
fn literal(text: &str) -> String {
    let mut out = String::new();
    let mut chars = text[1..].chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' => break,
            '\\' => match chars.next() {
                Some('\n') => {
                    while chars.peek().is_some_and(|c| c.is_whitespace()) {
                        chars.next();
                    }
                }
                Some(c) => out.push(c),
                None => break,
            },
            c => out.push(c),
        }
    }
    out
}

/// The longest piece between placeholders: what a reader would search for.
fn longest_piece(message: &str) -> String {
    let mut pieces = vec![String::new()];
    let mut depth = 0;
    for c in message.chars() {
        match c {
            '{' => {
                depth += 1;
                pieces.push(String::new());
            }
            '}' => depth -= 1,
            c if depth == 0 => pieces.last_mut().unwrap().push(c),
            _ => {}
        }
    }
    let trim = |p: &String| p.trim_matches(|c: char| !c.is_alphanumeric() && c != '.').to_owned();
    pieces.iter().map(trim).max_by_key(String::len).unwrap()
}

fn messages(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("#[error(") {
        let rest = text[at + "#[error(".len()..].trim_start();
        if rest.starts_with('"') {
            found.push(literal(rest).trim_start_matches("starwire: ").to_owned());
        }
    }
    // Not doc comments, not the tests at the end of a file.
    let code = text.split("#[cfg(test)]").next().unwrap();
    for (at, _) in code.match_indices("\"starwire: ") {
        let line = &code[code[..at].rfind('\n').map_or(0, |n| n + 1)..at];
        if !line.trim_start().starts_with("//") {
            found.push(literal(&code[at..]).trim_start_matches("starwire: ").to_owned());
        }
    }
    found
}

#[test]
fn every_message_is_explained() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let doc = std::fs::read_to_string(root.join("docs/troubleshooting.md")).unwrap();
    let mut files = Vec::new();
    sources(&root.join("src"), &mut files);
    let mut checked = 0;
    let mut missing = Vec::new();
    for file in
        files.iter().filter(|f| !f.starts_with(root.join("src/bin")) && !f.starts_with(root.join("src/starctl")))
    {
        for message in messages(&std::fs::read_to_string(file).unwrap()) {
            let piece = longest_piece(&message);
            if piece.len() < 4 {
                continue;
            }
            checked += 1;
            // In lists the doc leaves out the common beginning.
            let short = piece.trim_start_matches("the peer's advertisement ");
            if !doc.contains(&piece) && !doc.contains(short) {
                missing.push(format!("{}: {piece:?} (of {message:?})", file.strip_prefix(root).unwrap().display()));
            }
        }
    }
    assert!(missing.is_empty(), "docs/troubleshooting.md lacks:\n{}", missing.join("\n"));
    assert!(checked > 100, "only {checked} messages were found in the sources: does the search still work?");
}
