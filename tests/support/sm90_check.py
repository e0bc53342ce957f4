"""Shared checks of the sm_90a grouped GEMM: configs, problems, and functions that run them."""

import device_groups_check
import torch
from flat_parts import grouped_gemm
from oracle import bits, poisoned

from nvfp4_cute import KernelConfig
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.emulator.cubin import read_instructions
from nvfp4_cute.planning.arch import sm90
from nvfp4_cute.reference import expand_operand

EMULATED = "emulator:sm_90a"
# Machine code, as nvdisasm 13.0 prints it: the low bits of HGMMA, whose bits 84 to 86 are 0 if it ends a group (gsb0),
# and the lower half of WARPGROUP.DEPBAR.LE, whose bits 72 to 79 are the number of groups that may stay pending.
HGMMA, WARPGROUP_DEPBAR = 0xDF0, 0x00008000_000079C5
# The first and last group are empty. Others end inside a tile or on its edge, or begin inside a scale block.
ROWS = (0, 40, 96, 1, 130, 0)


def config(tokens, **settings):
    return KernelConfig((sm90.TILE_WEIGHTS, tokens, sm90.TILE_K), num_acc_stage=1, swap_ab=True, **settings)


def first(tokens, **settings):
    """A config with a preceding launch that decodes the tokens."""
    return config(tokens, decode_first=True, **settings)


def stream(tokens, **settings):
    """A config with stream-K."""
    return first(tokens, stream_k=True, **settings)


def on_gpu(tensor):
    """Copies to the GPU with the same row pitch."""
    if tensor.ndim < 2 or tensor.shape[0] < 2:
        return tensor.cuda()
    buffer = torch.empty((tensor.shape[0], tensor.stride(0)), dtype=tensor.dtype, device="cuda")
    return buffer[:, : tensor.shape[1]].copy_(tensor)


def run(case, operands, backend, chosen=None):
    """Outputs of one backend, written into poisoned buffers."""
    out = [poisoned(m, n, dtype=case.out_dtype) for m, n, _ in case.sizes]
    lists, alpha = list(operands)[:4], operands.alpha
    if backend == "cuda":
        out, lists = [t.cuda() for t in out], [[on_gpu(t) for t in tensors] for tensors in lists]
        alpha = None if alpha is None else alpha.cuda()
    grouped_gemm(*lists, alpha=alpha, out=out, out_dtype=case.out_dtype, backend=backend, config=chosen)
    return [t.cpu() for t in out]


def assert_sizes_on_the_device_match(form, chosen, mode, k=320):
    """Checks ragged or masked groups of ``ROWS``: the emulated kernel agrees with the reference in every bit."""
    arguments = device_groups_check.operands(form, ROWS, n=200, k=k, slack=9)
    expected = device_groups_check.run(arguments, "reference")
    with observe(mode=mode, check=True):
        actual = device_groups_check.run(arguments, EMULATED, config=chosen)
    assert torch.equal(bits(actual), bits(expected))


def assert_same_bits_in_every_launch(chosen):
    """Checks many launches on a GPU, of a problem so large that stages are refilled as soon as they are released."""
    m, n, k = 512, 4096, 8192
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
        for rows in (m, n)
    )
    # Scales of 1 to 1.875, so that sums of similar values change with any of them.
    a_scale, b_scale = (
        torch.randint(0x38, 0x40, (rows * k // 16,), dtype=torch.uint8, device="cuda", generator=generator)
        for rows in (m, n)
    )
    values = [expand_operand(x, s, "blocked").half() for x, s in ((a, a_scale), (b, b_scale))]
    expected = (values[0] @ values[1].T).float()
    outs = []
    for _ in range(40):
        outs += grouped_gemm([a], [b], [a_scale], [b_scale], out_dtype=torch.float32, config=chosen)
    # torch rounds sums to float16, with a relative error of at most 2^-11.
    torch.testing.assert_close(outs[0], expected, rtol=2.0**-10, atol=expected.abs().max().item() * 2.0**-10)
    assert not [i for i, out in enumerate(outs) if not torch.equal(out, outs[0])]


def assert_mmas_overlap(cubin, kernel="", ends=1):
    """Checks that the assembler did not serialize MMAs.

    It does so if it cannot tell what they read and write, which no result shows.

    Args:
        kernel: how the name of the kernel with MMAs begins.
        ends: number of places that wait for all MMAs.
    """
    words = read_instructions(cubin, kernel)
    mmas = [word for word in words if word & 0xFFF == HGMMA]
    ends_group = [word for word in mmas if not word >> 84 & 7]
    waits = [word >> 72 & 0xFF for word in words if word & (1 << 64) - 1 == WARPGROUP_DEPBAR]
    assert mmas and len(mmas) >= 4 * len(ends_group), f"{len(ends_group)} of {len(mmas)} MMAs end a group"
    assert waits.count(0) == ends and 1 in waits, f"waits until so many groups are left: {waits}"
