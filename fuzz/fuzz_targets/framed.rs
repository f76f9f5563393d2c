//! Blocks with right checksums and any content, between other inputs, on connections that are ready.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| starwire_fuzz::framed(data));
