"""Where a plan runs: a GPU, the emulator, or the float64 reference."""
