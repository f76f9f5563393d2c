//! Raw bytes from a stranger.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| starwire_fuzz::raw(data));
