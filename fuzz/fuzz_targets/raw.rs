//! Raw bytes from an unauthenticated peer.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| starwire_fuzz::raw(data));
