"""Proves that batch-invariant results do not depend on the batch: draws of rows on kernels, and whole models."""
