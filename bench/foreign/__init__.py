"""Our grouped products next to other people's CuTe DSL kernels: equal operands, emulator and timing model."""
