"""Benchmark definitions and committed result tables. Installed as nvfp4_cute.bench."""
