//! `include/starwire.h` is what cbindgen generates from `src/ffi`. `UPDATE=1 cargo test --test header` (`make header`)
//! regenerates it.

use std::path::Path;

#[test]
fn header_matches_src_ffi() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let generated = generate(root);
    let path = root.join("include/starwire.h");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, &generated).expect("include/starwire.h can be written");
        return;
    }
    let committed = std::fs::read_to_string(&path).expect("include/starwire.h can be read");
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

fn generate(root: &Path) -> String {
    let config = cbindgen::Config::from_file(root.join("cbindgen.toml")).expect("cbindgen.toml is valid");
    // cbindgen finds the modules of src/ffi from its mod.rs.
    let builder = cbindgen::Builder::new().with_config(config).with_src(root.join("src/ffi/mod.rs"));
    let mut text = Vec::new();
    builder.generate().expect("src/ffi can be turned into a header").write(&mut text);
    String::from_utf8(text).expect("cbindgen writes UTF-8")
}
