"""Kernel competitions: one-file submissions, a harness of our own, the genuine one, and submitting."""
