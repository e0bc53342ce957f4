"""A functional emulator of NVIDIA GPUs for the PTX that CuTe DSL emits."""
