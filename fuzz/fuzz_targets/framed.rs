//! Blocks with valid checksums and arbitrary content, interleaved with other events, on established connections.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| starwire_fuzz::framed(data));
