"""Device code in CuTe DSL. Installed as nvfp4_cute.kernels."""
