//! Replays the fuzz corpus and mutations of it with the stable compiler. `STARWIRE_FUZZ_ROUNDS=n` sets the number of
//! mutations.

#![allow(clippy::cast_possible_truncation, clippy::print_stderr, reason = "test data is small")]

#[path = "../fuzz/lib.rs"]
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;

fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("a readable corpus").path())
        .collect();
    files.sort();
    assert!(files.len() >= 5, "the corpus of {target} is there");
    files
        .into_iter()
        .map(|file| (file.display().to_string(), std::fs::read(&file).expect("a readable corpus")))
        .collect()
}

/// splitmix64
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn mutate(bytes: &mut Vec<u8>, other: &[u8], state: &mut u64) {
    for _ in 0..1 + next(state) % 4 {
        let at = (next(state) % (bytes.len() as u64 + 1)) as usize;
        match next(state) % 7 {
            0 if at < bytes.len() => bytes[at] ^= 1 << (next(state) % 8),
            1 if at < bytes.len() => bytes[at] = [0, 1, 0x7f, 0x80, 0xff][(next(state) % 5) as usize],
            2 => bytes.insert(at, next(state) as u8),
            3 if at < bytes.len() => drop(bytes.remove(at)),
            4 => bytes.truncate(at),
            5 => {
                let from = (next(state) % (other.len() as u64 + 1)) as usize;
                let len = (next(state) % 200) as usize;
                let piece = other[from..other.len().min(from + len)].to_vec();
                bytes.splice(at..at, piece);
            }
            _ if at + 8 <= bytes.len() => {
                let number = next(state) >> (next(state) % 64);
                bytes[at..at + 8].copy_from_slice(&number.to_le_bytes());
            }
            _ => {}
        }
    }
}

fn replay(target: &str, drive: fn(&[u8])) {
    let corpus = corpus(target);
    let check = |what: &str, input: &[u8]| {
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drive(input))) {
            eprintln!("{target} fails with {what}: {input:?}");
            resume_unwind(panic);
        }
    };
    for (name, input) in &corpus {
        check(name, input);
    }
    let rounds = std::env::var("STARWIRE_FUZZ_ROUNDS").map_or(4000, |rounds| rounds.parse().expect("a number"));
    let mut state = 42;
    for round in 0..rounds {
        let mut pick = || &corpus[(next(&mut state) % corpus.len() as u64) as usize].1;
        let (mut input, other) = (pick().clone(), pick());
        mutate(&mut input, other, &mut state);
        check(&format!("mutation {round}"), &input);
    }
}

#[test]
fn raw_bytes() {
    replay("raw", targets::raw);
}

#[test]
fn framed_scripts() {
    replay("framed", targets::framed);
}

#[test]
fn star_heads() {
    replay("star", targets::star);
}

#[test]
fn texts() {
    replay("text", targets::text);
}
