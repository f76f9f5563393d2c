//! What the fuzz targets do with their input; shared with `tests/fuzz_corpus.rs`.

mod connection;
mod text;

pub use connection::{framed, raw};
pub use text::text;
