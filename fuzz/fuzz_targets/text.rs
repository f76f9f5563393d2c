//! Text formats written by people and peers.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| starwire_fuzz::text(data));
