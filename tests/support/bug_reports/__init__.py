"""Small CuTe DSL kernels that reproduce reported faults of public kernels, each with and without the fault.

A kernel takes `src` and `out` (Int32, 1-D), and `fixed`, which removes the fault.
"""
