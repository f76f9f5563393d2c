//! `include/starwire.h` is what cbindgen generates from `src/ffi`. `UPDATE=1 cargo test --test header` (`make header`)
//! regenerates it.

use std::collections::HashSet;
use std::path::Path;

#[test]
fn header_matches_src_ffi() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let generated = generate(root);
    let path = root.join("include/starwire.h");
    let committed = std::fs::read_to_string(&path).expect("include/starwire.h can be read");
    // A header that is written again makes all of cc/ compile again.
    if std::env::var_os("UPDATE").is_some() && committed != generated {
        std::fs::write(&path, &generated).expect("include/starwire.h can be written");
        return;
    }
    let difference = committed.lines().zip(generated.lines()).enumerate().find(|(_, (a, b))| a != b);
    assert!(
        committed == generated,
        "include/starwire.h is stale: type `make header` and commit the result. First difference (line, committed, generated): {difference:?}"
    );
}

#[test]
fn every_function_of_the_header_is_documented() {
    let header = generate(Path::new(env!("CARGO_MANIFEST_DIR")));
    let mut documented = false;
    let mut functions = 0;
    for line in header.lines() {
        if line.starts_with("//") || line.starts_with("/*") || line.starts_with(" *") {
            documented = true;
        } else if line.trim().is_empty() {
            documented = false;
        } else if line.contains("sw_") && line.contains('(') && !line.starts_with(' ') {
            functions += 1;
            assert!(documented, "no doc comment in src/ffi for: {line}");
            documented = false;
        }
    }
    assert!(functions > 10, "only {functions} functions found: did src/ffi move?");
}

/// Name and signature of every function of the header.
fn functions(header: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    let code: Vec<&str> = header.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    for statement in code.join("\n").split(';') {
        // Neither the fields of structs nor pointers to functions.
        let statement = statement.rsplit(['{', '}', '#']).next().unwrap_or_default();
        let Some((head, _)) = statement.split_once('(').filter(|(_, rest)| !rest.starts_with('*')) else { continue };
        let name = head.rsplit([' ', '*', '\n']).next().unwrap_or_default();
        if name.starts_with("sw_") && head.trim() != name {
            found.push((name.to_owned(), statement.to_owned()));
        }
    }
    assert!(found.len() > 50, "only {} functions found in include/starwire.h", found.len());
    found
}

#[test]
fn a_function_belongs_to_the_type_that_its_name_begins_with() {
    let header = generate(Path::new(env!("CARGO_MANIFEST_DIR")));
    let types: Vec<&str> = header
        .lines()
        .filter_map(|line| line.strip_prefix("typedef struct ")?.split([' ', ';']).next())
        .filter(|name| name.starts_with("sw_"))
        .collect();
    assert!(types.len() > 10, "{types:?}");
    for (name, signature) in functions(&header) {
        let owner = types.iter().filter(|owner| name.strip_prefix(**owner).is_some_and(|rest| rest.starts_with('_')));
        if let Some(owner) = owner.max_by_key(|owner| owner.len()) {
            let words = |text: &str| text.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == *owner);
            assert!(words(&signature), "{name} neither takes nor makes a {owner}: {signature}");
        }
    }
}

#[test]
fn the_shim_uses_every_function() {
    /// Read by tests: the metrics of an engine, and the table of operations.
    const FOR_TESTS: [&str; 2] = ["sw_engine_metrics", "sw_op_name"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut sources = String::new();
    let mut folders = vec![root.join("cc")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("cc/ can be listed") {
            let path = entry.expect("cc/ can be listed").path();
            if path.is_dir() {
                folders.push(path);
            } else {
                sources.push_str(&std::fs::read_to_string(&path).expect("a source"));
            }
        }
    }
    let words: HashSet<&str> = sources.split(|c: char| !c.is_alphanumeric() && c != '_').collect();
    for (name, _) in functions(&generate(root)) {
        let used = words.contains(name.as_str());
        assert_eq!(used, !FOR_TESTS.contains(&name.as_str()), "{name}: used in cc/: {used}");
    }
}

fn generate(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is valid");
    // cbindgen finds the modules of src/ffi from its mod.rs.
    let builder = cbindgen::Builder::new().with_config(config).with_src(root.join("src/ffi/mod.rs"));
    let mut text = Vec::new();
    builder.generate().expect("src/ffi can be turned into a header").write(&mut text);
    String::from_utf8(text).expect("cbindgen writes UTF-8")
}
