"""16-bit tokens times quantized weights with ``mma.sync``: one kernel for every architecture from sm_80 on."""
