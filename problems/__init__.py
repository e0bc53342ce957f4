"""Kernel-competition problems, one folder each. Installed as nvfp4_cute.problems."""
