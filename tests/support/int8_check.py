"""INT8 operands whose sums are exact."""

import torch

import nvfp4_cute as nv

FORMATS = {"a_format": nv.INT8, "b_format": nv.INT8}
PAIR = (nv.INT8, nv.INT8)


def some(*shape, seed=0):
    """All integers including -128, with scales that are not powers of two."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    data = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    scale = torch.rand((*shape[:-1], 1), generator=generator) + 0.5
    return nv.BlockScaledTensor(data, scale, None, shape, "rowmajor", format=nv.INT8)
