"""Operands of weight-only grouped products with exact sums, and functions that run them."""

from dataclasses import replace

import torch
from oracle import poisoned

from nvfp4_cute import backends
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.formats.block_format import BFLOAT16, NVFP4, format_of_values
from nvfp4_cute.formats.codecs import encode, encode_e4m3, encode_ue8m0
from nvfp4_cute.formats.scale_layout import to_blocked
from nvfp4_cute.formats.zero_points import scale_words
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.operands.grouped import GroupedOperands
from nvfp4_cute.operands.operand import Operand
from nvfp4_cute.planning.arch import sm90_weight_only as planning
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import GroupedProblem

EMULATED = "emulator:sm_90a"
# The first and last group are empty. Others end inside a tile or on its edge.
ROWS = (0, 40, 5, 1, 66, 0)
# Integers of 3 bits times e2m1 times these: sums are exact in fp32 in any order. Then codes of scales, and of NaN.
FEW_SCALES, ZERO_POINTS = torch.tensor([0.25, 0.5, -1.0, 2.0]), torch.tensor([0, 7, 8, 16])
SCALES = {
    "ue4m3": encode_e4m3(torch.tensor([0.0, 0.5, 1.0, 2.0])),
    "ue8m0": encode_ue8m0(torch.tensor([0.25, 0.5, 1.0, 2.0])),
    "bf16": FEW_SCALES.bfloat16(),
    "fp16": FEW_SCALES.half(),
    "fp32": FEW_SCALES,
    "bf16_zero": scale_words(FEW_SCALES.bfloat16(), ZERO_POINTS),
    "fp16_zero": scale_words(FEW_SCALES.half(), ZERO_POINTS),
}
NAN_CODES = {"ue4m3": 0x7F, "ue8m0": 0xFF, "bf16_zero": 0x7FFF, "fp16_zero": 0x7FFF}
ALPHAS = (0.5, -2.0, 1.0, 4.0)


def config(tokens, k=128, **settings):
    """Config of one product, or of two with interleaved weights."""
    return KernelConfig((128, tokens, k), num_acc_stage=1, swap_ab=True, **settings)


def dual(tokens, k=128, **settings):
    """Config of two products with separate weights."""
    return KernelConfig((64, tokens, k), num_acc_stage=1, swap_ab=True, **settings)


def weights(groups, n, k, generator, format=NVFP4):
    """Weights uint8 [G, N, bytes of K] and scales [G, bytes]. Nobody may use gaps between rows or padding of scales."""
    length = format.row_bytes(k)
    buffer = torch.full((groups, n, -(-length // 16) * 16 + 16), 0x77, dtype=torch.uint8)
    if format.element.bits == 8:
        numbers = torch.randint(-7, 8, (groups, n, k), generator=generator).float()
        buffer[..., :length] = (
            numbers.to(torch.int8) if format.has_integer_sums else encode(numbers, format.element)
        ).view(torch.uint8)
    else:
        shape = (groups, n, length)
        buffer[..., :length] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    codes, k_blocks = SCALES[format.scale.name], k // format.block_of(k)
    if format.scale_layout == "rowmajor":
        chosen = torch.randint(0, 4, (groups, *format.scale_shape(n, k)), generator=generator)
        return buffer[..., :length], codes[chosen].flatten(1).view(torch.uint8)
    padding = NAN_CODES.get(format.scale.name, torch.nan)
    scale = torch.full((groups, *format.padded_scale_shape(n, k)), padding, dtype=codes.dtype)
    scale[:, :n] = 0
    scale[:, :n, :k_blocks] = codes[torch.randint(0, 4, (groups, n, k_blocks), generator=generator)]
    return buffer[..., :length], torch.stack([to_blocked(x).flatten().view(torch.uint8) for x in scale])


def tokens(batches, rows, k, dtype, generator):
    """Tokens [batches, rows, K] with gaps between rows that nobody may use."""
    pitch = -(-k // 8) * 8 + 8
    buffer = torch.full((batches, rows, pitch), float("nan"), dtype=dtype)
    buffer[..., :k] = torch.randint(-7, 8, (batches, rows, k), generator=generator).to(dtype)
    return buffer[..., :k]


def task(
    form,
    rows,
    n,
    k,
    chosen,
    dtype=torch.bfloat16,
    out_dtype=torch.float32,
    gate=None,
    has_alpha=False,
    seed=0,
    format=NVFP4,
):
    """A task with poisoned outputs. If the device knows the sizes, some rows belong to no group. n: columns of the results."""
    generator, groups = torch.Generator().manual_seed(seed), len(rows)
    n_b = n if gate is None or gate.weight_layout == "separate" else 2 * n
    listed, two = form == "list", gate is not None and gate.weight_layout == "separate"
    found = [weights(groups, n_b, k, generator, format) for _ in range(1 + two)]
    slack = 0 if form in ("list", "batched") else 3
    if listed:
        a = tuple(tokens(1, m, k, dtype, generator) for m in rows)
        found = [(b.split(1), s.split(1)) for b, s in found]
        out = tuple(poisoned(1, m, n, dtype=out_dtype) for m in rows)
    else:
        shape = (1, sum(rows) + slack) if form == "ragged" else (groups, max(rows) + slack)
        a, out = (tokens(*shape, k, dtype, generator),), (poisoned(*shape, n, dtype=out_dtype),)
        found = [((b,), (s,)) for b, s in found]
    sizes = {"ragged": torch.tensor(rows).cumsum(0).int(), "masked": torch.tensor(rows).int()}.get(form)
    alphas = [
        torch.tensor(ALPHAS * groups)[i : i + groups].contiguous() if has_alpha else None for i in (0, 1)
    ]
    operands = [
        tuple(Operand(b, scale, format, n_b, k, len(b)) for b, scale in zip(*side, strict=True))
        for side in found
    ]
    problem = GroupedProblem(
        tuple((m, n_b, k) for m in rows), form, out_dtype, has_alpha, activation=gate and gate.activation,
        weight_layout=gate.weight_layout if gate else "separate", limit=gate and gate.limit,
        a_format=format_of_values(dtype), b_format=format,
    )  # fmt: skip
    rows_of_a = tuple(map(Operand.of_values, a))
    checked = GroupedOperands(
        rows_of_a, operands[0], out, alphas[0], operands[1] if two else (), alphas[1] if gate else None, sizes=sizes,
    )  # fmt: skip
    return GroupedTask(problem, checked, chosen)


def key_of(
    chosen,
    dtype=torch.bfloat16,
    out_dtype=torch.bfloat16,
    gate=None,
    format=NVFP4,
    arch="sm_90a",
    has_alpha=True,
):
    """The key of a ragged product."""
    dual = {}
    if gate is not None:
        dual = {
            "activation": gate.activation,
            "weight_layout": gate.weight_layout,
            "has_limit": gate.limit is not None,
        }
    formats = {"a_format": format_of_values(dtype), "b_format": format}
    return KernelKey(arch, chosen, 1, out_dtype, has_alpha, "ragged", **formats, **dual).validated()


def on_gpu(made):
    """Copies the task to the current GPU."""

    def moved(x):
        if isinstance(x, tuple):
            return tuple(map(moved, x))
        if isinstance(x, Operand):
            return replace(x, data=x.data.cuda(), scale=x.scale.cuda())
        return x.cuda() if isinstance(x, torch.Tensor) else x

    return replace(
        made, operands=GroupedOperands(**{name: moved(x) for name, x in vars(made.operands).items()})
    )


def run_both(mode="eager", backend=EMULATED, **arguments):
    """Returns the results of a kernel and of the reference, one entry per tensor."""
    made, expected = task(**arguments), task(**arguments)
    with observe(mode=mode, check=True):
        backends.run_task(backend, made)
    expected.reference()
    return list(made.operands.out), list(expected.operands.out)


def largest_candidates(num_b=1, format=NVFP4):
    """One config of every kind: the most tokens with each K tile, share of tokens and split."""
    kinds = {}
    for found in planning.candidates(num_b, formats=(BFLOAT16, format)):
        if found.stream_k:
            continue
        kinds[found.work_tile_mnk[2], found.multicast_n, found.split_k, planning.ctas_per_sm(found)] = found
    return list(kinds.values())
