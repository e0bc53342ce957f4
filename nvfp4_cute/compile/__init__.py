"""CuTe DSL to machine code, remembered in memory and on disk."""
