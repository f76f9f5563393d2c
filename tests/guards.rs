//! No C++ exception crosses into Rust: every C function that cc/ passes to the transport is guarded (cc/base/guard.h).

use std::fs;
use std::path::{Path, PathBuf};

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("cc/ is there") {
        let path = entry.expect("a readable folder").path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "cc" || extension == "h") {
            found.push(path);
        }
    }
}

/// Returns the text without comments, on one line.
fn code(text: &str) -> String {
    let lines = text.lines().map(|line| line.split("//").next().unwrap_or_default().trim());
    lines.collect::<Vec<_>>().join(" ")
}

/// Splits `list` at commas outside of brackets.
fn items(list: &str) -> Vec<String> {
    let (mut items, mut depth) = (vec![String::new()], 0i32);
    for c in list.chars() {
        depth += match c {
            '(' | '{' | '[' | '<' => 1,
            ')' | '}' | ']' | '>' => -1,
            _ => 0,
        };
        if c == ',' && depth == 0 {
            items.push(String::new());
        } else if let Some(item) = items.last_mut() {
            item.push(c);
        }
    }
    items.iter().map(|item| item.trim().to_string()).collect()
}

/// Items between the braces that follow each `begin`, e.g. `sw_payload payload = `.
fn initialisers(code: &str, begin: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices(begin) {
        let rest = &code[at + begin.len()..];
        let Some(open) = rest.find(['{', ';', ')']).filter(|open| rest[*open..].starts_with('{')) else { continue };
        let mut depth = 0i32;
        let close = rest[open..].char_indices().find(|(_, c)| {
            depth += i32::from(*c == '{') - i32::from(*c == '}');
            depth == 0
        });
        if let Some((length, _)) = close {
            found.push(items(&rest[open + 1..open + length]));
        }
    }
    found
}

/// Functions passed to the transport unguarded, and the number of all functions passed.
fn unguarded(code: &str) -> (Vec<String>, usize) {
    let mut functions = Vec::new();
    for (text, first) in
        [("sw_op_vtable ", 1), ("payload_ = ", 3), ("sw_payload payload = ", 3), ("RecvCall::kVtable = ", 1)]
    {
        for list in initialisers(code, text) {
            functions.extend(list.into_iter().skip(first));
        }
    }
    // Tables filled field by field; their other fields are numbers.
    for table in ["handlers.", "kernels.", "objects."] {
        for (at, _) in code.match_indices(table) {
            let statement = code[at + table.len()..].split(';').next().unwrap_or_default();
            if let Some((field, value)) = statement.split_once(" = ") {
                let no_functions = [
                    "struct_size",
                    "scratch_size",
                    "scratch_align",
                    "private_payloads",
                    "star",
                    "star_ctx",
                    "incarnations",
                    "n_incarnations",
                ];
                let is_number = no_functions.contains(&field);
                if field.bytes().all(|b| b.is_ascii_lowercase() || b == b'_') && !is_number {
                    functions.push(value.to_string());
                }
            }
        }
    }
    // `release` is a parameter of Set, whose callers are checked below.
    functions.retain(|function| function != "release");
    for (at, begin) in code.match_indices("out->Set(") {
        if let Some(arguments) = code[at + begin.len()..].split(");").next() {
            functions.extend(items(arguments).into_iter().nth(3));
        }
    }
    for (at, begin) in code.match_indices("sw_engine_when_written(") {
        if let Some(arguments) = code[at + begin.len()..].split(");").next() {
            functions.extend(items(arguments).into_iter().nth(1));
        }
    }
    for (at, _) in code.match_indices("out.name = ") {
        functions.extend(code[at + 11..].split(';').next().map(str::to_string).filter(|value| value.contains('&')));
    }
    functions.retain(|function| function != "nullptr" && !function.is_empty());
    let all = functions.len();
    functions.retain(|function| !function.starts_with("Guarded<"));
    (functions, all)
}

#[test]
fn every_function_for_the_transport_is_guarded() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("cc"), &mut files);
    let mut all = 0;
    for file in files {
        let (without, some) = unguarded(&code(&fs::read_to_string(&file).expect("a readable source")));
        assert_eq!(without, Vec::<String>::new(), "{}: give the transport Guarded<&Function>", file.display());
        all += some;
    }
    assert!(all >= 40, "only {all} functions were found: were the tables renamed?");
}

#[test]
fn closures_do_not_start_threads() {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("cc"), &mut files);
    for file in files {
        let code = code(&fs::read_to_string(&file).expect("a readable source"));
        let started = code.matches("SchedClosure").count() + code.matches("StartThread").count();
        assert!(started == 0, "{}: SchedClosure starts a thread each time: see BackgroundQueue", file.display());
    }
}

#[test]
fn an_unguarded_function_would_be_found() {
    let found = |code: &str| unguarded(code).0;
    assert_eq!(found("handlers.on_call = &Handlers::OnCall;"), ["&Handlers::OnCall"]);
    assert_eq!(found("handlers.on_call = Guarded<&Handlers::OnCall, &Handlers::CallThrew>;"), Vec::<String>::new());
    let vtable = "static const sw_op_vtable kVtable = {sizeof(sw_op_vtable), Guarded<&A::Alloc>, &A::Done};";
    assert_eq!(found(vtable), ["&A::Done"]);
    let payload = "const sw_payload payload = {&part, 1, bytes, [](void* owner) { delete owner; }};";
    assert_eq!(found(payload), ["[](void* owner) { delete owner; }"]);
    assert_eq!(found("sw_engine_when_written(engine_.get(), call, new Then(then));"), ["call"]);
    assert_eq!(found("sw_payload payload_ = {nullptr, 0, nullptr, nullptr};"), Vec::<String>::new());
    assert_eq!(found("out->Set(base, bytes, new Lent{hook, pool}, &ReleaseHook);"), ["&ReleaseHook"]);
}
