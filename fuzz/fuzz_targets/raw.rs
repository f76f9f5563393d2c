//! Bytes as a stranger sends them.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| starwire_fuzz::raw(data));
