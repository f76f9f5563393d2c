//! Blocks with right checksums and any content, between other inputs, on connections that are ready.
#![no_main]

#[path = "../drive.rs"]
mod drive;

libfuzzer_sys::fuzz_target!(|data: &[u8]| drive::framed(data));
