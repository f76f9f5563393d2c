//! The bodies of the fuzz targets, shared with `tests/fuzz_corpus.rs`.

mod connection;
mod text;

pub use connection::{framed, raw};
pub use text::text;
