//! The bodies of the fuzz targets, shared with `tests/fuzz_corpus.rs`.

mod connection;
mod star;
mod text;

pub use connection::{framed, raw};
pub use star::star;
pub use text::text;
