"""Checks that batch-invariant results do not depend on the batch, with random batches of operations and with whole models."""
