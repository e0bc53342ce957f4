"""A functional emulator of NVIDIA GPUs for PTX as CuTe DSL emits it."""
