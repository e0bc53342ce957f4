"""Random calls of every public operation on every backend: ``python -m fuzz --help``."""
