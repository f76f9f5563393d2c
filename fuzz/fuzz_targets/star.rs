//! The heads of star calls.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| starwire_fuzz::star(data));
