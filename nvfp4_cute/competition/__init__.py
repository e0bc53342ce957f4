"""Kernel competitions: one-file submissions, our own harness, the genuine one, and submitting."""
