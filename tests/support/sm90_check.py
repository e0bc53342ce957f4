"""What tests of the sm_90a grouped GEMM share: configs, problems, and how to run them."""

import device_groups_check
import torch
from oracle import bits, poisoned

from nvfp4_cute import KernelConfig
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.emulator.cubin import read_instructions
from nvfp4_cute.ops.parts import grouped_gemm
from nvfp4_cute.planning.arch import sm90
from nvfp4_cute.reference import expand_operand

EMULATED = "emulator:sm_90a"
# Machine code, as nvdisasm 13.0 shows it: the low bits of HGMMA, whose bits 84 to 86 are 0 where it ends a group (gsb0), and the lower
# half of WARPGROUP.DEPBAR.LE, whose bits 72 to 79 are the groups that it leaves.
HGMMA, WARPGROUP_DEPBAR = 0xDF0, 0x00008000_000079C5
# Groups of no rows first and last; groups that end within a tile, and on its edge; tiles that begin within a scale block.
ROWS = (0, 40, 96, 1, 130, 0)


def config(tokens, **settings):
    return KernelConfig((sm90.TILE_WEIGHTS, tokens, sm90.TILE_K), num_acc_stage=1, swap_ab=True, **settings)


def first(tokens, **settings):
    """Tokens are decoded by a launch before."""
    return config(tokens, decode_first=True, **settings)


def stream(tokens, **settings):
    """With stream-K."""
    return first(tokens, stream_k=True, **settings)


def on_gpu(tensor):
    """The same values with the same row pitch."""
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
    """Ragged or masked groups of ``ROWS``: the emulated kernel's bits are the reference's."""
    arguments = device_groups_check.operands(form, ROWS, n=200, k=k, slack=9)
    expected = device_groups_check.run(arguments, "reference")
    with observe(mode=mode, check=True):
        actual = device_groups_check.run(arguments, EMULATED, config=chosen)
    assert torch.equal(bits(actual), bits(expected))


def assert_same_bits_in_every_launch(chosen):
    """On a GPU: many launches of a problem large enough that stages are filled again as soon as they are released."""
    m, n, k = 512, 4096, 8192
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randint(0, 256, (rows, k // 2), dtype=torch.uint8, device="cuda", generator=generator)
        for rows in (m, n)
    )
    # Scales of 1 to 1.875: sums of values that differ by little, and so change with any of them.
    a_scale, b_scale = (
        torch.randint(0x38, 0x40, (rows * k // 16,), dtype=torch.uint8, device="cuda", generator=generator)
        for rows in (m, n)
    )
    values = [expand_operand(x, s, "blocked").half() for x, s in ((a, a_scale), (b, b_scale))]
    expected = (values[0] @ values[1].T).float()
    outs = []
    for _ in range(40):
        outs += grouped_gemm([a], [b], [a_scale], [b_scale], out_dtype=torch.float32, config=chosen)
    # torch's sums are rounded to float16, by 2^-11 of theirs at most.
    torch.testing.assert_close(outs[0], expected, rtol=2.0**-10, atol=expected.abs().max().item() * 2.0**-10)
    assert not [i for i, out in enumerate(outs) if not torch.equal(out, outs[0])]


def assert_mmas_overlap(cubin, kernel="", ends=1):
    """The assembler waits for no MMA by itself: where it cannot tell what they read and write it serializes all of them, which no
    result shows.

    Args:
        kernel: how the name of the one with MMAs begins. ends: places where all MMAs are waited for.
    """
    words = read_instructions(cubin, kernel)
    mmas = [word for word in words if word & 0xFFF == HGMMA]
    ends_group = [word for word in mmas if not word >> 84 & 7]
    waits = [word >> 72 & 0xFF for word in words if word & (1 << 64) - 1 == WARPGROUP_DEPBAR]
    assert mmas and len(mmas) >= 4 * len(ends_group), f"{len(ends_group)} of {len(mmas)} MMAs end a group"
    assert waits.count(0) == ends and 1 in waits, f"waits until so many groups are left: {waits}"
