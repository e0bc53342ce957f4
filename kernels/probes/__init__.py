"""Tiny kernels that show what a GPU does where documents are silent, and microbenchmarks: PTX text in a CuTe DSL frame."""
