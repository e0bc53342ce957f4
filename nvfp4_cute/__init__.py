"""NVFP4 block-scaled grouped GEMM in CuTe DSL: operations, emulator, schedule, and formats."""
