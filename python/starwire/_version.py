"""The version of this package and of the library: the same as in Cargo.toml."""

__version__ = "0.1.0"
