"""Faults that people reported of public kernels, each made anew as a small CuTe DSL kernel with and without it.

A kernel takes `src` and `out` (Int32, 1-D) and `fixed`.
"""
