"""Compiles CuTe DSL to machine code, with caches in memory and on disk."""
