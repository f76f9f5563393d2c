"""Version of this package and of the library; must match Cargo.toml."""

__version__ = "0.2.0"
