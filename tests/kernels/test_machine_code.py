"""Machine code of every variant that may be chosen: no spills, no calls, few enough registers, and late enough releases.

For a TMA instruction that an architecture does not have, the assembler would generate a call.
"""

import re
from dataclasses import replace
from functools import partial
from itertools import islice, product

import cases
import pytest
import torch
from fp8_check import on_sm90
from sm90_check import assert_mmas_overlap
from stage_release import unfinished_reads
from weight_only_check import key_of, largest_candidates

import nvfp4_cute as nv
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.compile.simt_keys import FewRowsKey, GemvKey, QuantizeKey, W4A16Key
from nvfp4_cute.formats.block_format import INT4_FORMATS, NVFP4_PAIR
from nvfp4_cute.planning.arch import (
    family_of,
    is_weight_only,
    simt,
    sm90,
    sm90_fp8,
    sm100,
    sm100_fp8,
    sm100_int8,
    sm120,
)
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.problem import Gate, GroupedProblem, result_format

F16, BF16, F32, I32 = torch.float16, torch.bfloat16, torch.float32, torch.int32
FP8, INT8, MXFP4 = (nv.FP8_1x128, nv.FP8_128x128), (nv.INT8, nv.INT8), (nv.MXFP4, nv.MXFP4)
MX = (nv.MXFP8_E4M3, nv.MXFP4, nv.MXFP8_E5M2)
BYTE_PAIRS = ((nv.MXFP8_E4M3, nv.MXFP8_E5M2), (nv.MXFP8_E5M2, nv.MXFP4), (nv.MXFP4, nv.MXFP8_E4M3))
BOTH = ("list", "ragged")
FAMILIES = ("sm_90a", "sm_100a", "sm_120a")
LAYOUTS = ("interleaved_64_up_first", "interleaved_32_gate_first")
SILU, BOUNDED, GELU = (
    {"activation": "silu"},
    {"activation": "silu", "has_limit": True},
    {"activation": "gelu_tanh", "has_limit": True},
)
SEPARATE = Gate("silu", None, "separate")
SPILLS = {"t128x96x128_s0a1_swap": 8, "t128x96x128_s0a1_swap_m2": 8, "t128x64x128_s0a1_swap_k2": 8}
"""Bytes of local memory of a thread, of FP8 duals of lists with float32 results: two registers, once a tile, behind the K loop."""


def grouped(arch, configs, dtypes=(BF16,), forms=("ragged",), pair=NVFP4_PAIR, groups=1, **options):
    """Keys of grouped GEMMs. Only lists have a number of groups; sums of integers have no factor."""
    options |= {"a_format": pair[0], "b_format": pair[1]}
    for config, form, dtype in product(configs, forms, dtypes):
        yield KernelKey(arch, config, groups if form == "list" else 1, dtype, dtype != I32, form, **options)


def with_a_bias():
    for arch, out_format in product(FAMILIES, (None, nv.NVFP4)):
        dtypes = (BF16, F32) if out_format is None else ("nvfp4",)
        yield from grouped(arch, candidates(arch, "list", out_format), dtypes, ("list",), bias_dtype=BF16)


def chosen(arch, rows, **options):
    problem = GroupedProblem(((rows, 4096, 4096),), **options)
    return KernelKey.of(arch, family_of(arch).choose(problem, 148), problem)


def chosen_for_every_pair():
    for arch, rows, dtype in product(FAMILIES, (16, 4096), (BF16, "nvfp4")):
        for a, b in family_of(arch).MMA:
            if (a, b) != NVFP4_PAIR and a.scale_layout == "blocked":
                yield partial(chosen, arch, rows, out_dtype=dtype, a_format=a, b_format=b)


def dual_of_one_weight():
    for layout, dtype in product(LAYOUTS, (BF16, "nvfp4")):
        configs = sm120.candidates(1, layout, result_format(dtype))
        yield from grouped("sm_120a", configs, (dtype,), weight_layout=layout, **BOUNDED)
    for layout in ("separate", *LAYOUTS):
        configs = sm90.candidates(2 if layout == "separate" else 1)
        yield from grouped("sm_90a", configs, weight_layout=layout, **BOUNDED)


def dual_of_one_weight_on_sm100():
    for layout in LAYOUTS:
        configs = sm100.candidates(1, layout)
        yield from grouped("sm_100a", configs, (BF16, "nvfp4"), weight_layout=layout, **BOUNDED)


def quantized_results():
    for arch, format, num_b in product(FAMILIES, (nv.NVFP4, *MX[:2]), (1, 2)):
        if format != nv.NVFP4 or arch == "sm_90a":  # test_quantized_output has the others
            configs = family_of(arch).candidates(num_b, out_format=format)
            yield from grouped(
                arch, configs, (format.name,), ("list",), groups=2, **(SILU if num_b == 2 else {})
            )


def fp8_results():
    for (arch, family), num_b in product((("sm_90a", sm90_fp8), ("sm_100a", sm100_fp8)), (1, 2)):
        configs = family.candidates(num_b, out_format=nv.FP8_1x128)
        yield from grouped(arch, configs, (nv.FP8_1x128.name,), pair=FP8, **(GELU if num_b == 2 else {}))


def fp8_on_sm90():
    yield from grouped("sm_90a", sm90_fp8.candidates(), forms=BOTH, pair=FP8)
    yield from grouped("sm_90a", sm90_fp8.candidates(2), (BF16, F32), BOTH, FP8, **GELU)


def fp8_on_sm100():
    for num_b, gate in ((1, {}), (2, BOUNDED)):
        yield from grouped("sm_100a", sm100_fp8.candidates(num_b), (BF16, F32), BOTH, FP8, **gate)


def fp8_on_sm120():
    yield from grouped("sm_120a", sm120.candidates(formats=FP8), (BF16, F32), BOTH, FP8)
    yield from grouped("sm_120a", sm120.candidates(2, formats=FP8), forms=BOTH, pair=FP8, **BOUNDED)


def int8():
    yield from grouped("sm_90a", sm90_fp8.candidates(formats=INT8), forms=BOTH, pair=INT8)
    yield from grouped("sm_90a", [on_sm90(192)], (I32,), ("list",), INT8)
    yield from grouped("sm_100a", sm100_int8.CANDIDATES, (BF16, F32, I32), BOTH, INT8)
    yield from grouped("sm_120a", sm120.candidates(formats=INT8), (BF16, I32), BOTH, INT8)


def mx_on_sm90():
    yield from grouped("sm_90a", sm90.candidates()[::7], pair=MXFP4)
    for pair, num_b in product(BYTE_PAIRS, (1, 2)):
        configs = sm90.candidates(num_b, formats=pair)[num_b::9]
        yield from grouped("sm_90a", configs, pair=pair, **(SILU if num_b == 2 else {}))


def weight_only(format, dtypes=(BF16,), gates=(None, SEPARATE), out=None):
    for gate, dtype in product(gates, dtypes):
        for config in largest_candidates(1 if gate is None else 2, format):
            yield key_of(config, dtype, out or dtype, gate, format)


def weight_only_formats():
    for format in MX[:2]:
        yield from weight_only(format)
    for format in (
        nv.int4_format(32), nv.int4_format(128, "float16", zero_points=True), nv.int4_format(32, zero_points=True),
        nv.int4_format(128, "float32"),
    ):  # fmt: skip
        yield from weight_only(format, (BF16, F16))


def few_rows_times(formats, dtypes=(BF16, F16), archs=FAMILIES):
    for arch, dtype, tokens, format in product(archs, dtypes, simt.W4A16_TOKENS, formats):
        key = W4A16Key(arch, dtype, BF16, True, tokens, format)
        yield key
        if key.blocks_per_sm > 1:
            yield replace(key, warps=simt.W4A16_MANY_WARPS)


def few_rows():
    yield from few_rows_times([nv.FP8_128x128, nv.INT8, *list(INT4_FORMATS.values())[::3]])
    yield from few_rows_times(MX, (BF16,), ("sm_90a",))


def quantizations():
    """Every variant of NVFP4 on every architecture. For a second input, one dtype and one layout are enough."""
    for arch, dtype, scaled, (is_grouped, blocked) in product(
        simt.ARCHS, (BF16, F16), (False, True), ((False, False), (False, True), (True, True))
    ):
        ups = (False, True) if blocked and dtype == BF16 else (False,)
        for has_up, words in product(ups, simt.QUANTIZE_CHOICES):
            yield QuantizeKey(arch, dtype, scaled, is_grouped, blocked, has_up, words=words)
        if scaled and blocked and not is_grouped:
            words = simt.QUANTIZE_FEW_WORDS
            yield QuantizeKey(arch, dtype, scaled, is_grouped, blocked, words=words, found_times=1)


def quantizations_to_mx():
    rest = product((F16, BF16), MX, ("up", "down"), (False, True))
    for arch, (dtype, format, rounding, has_up) in product(("sm_100a", "sm_90a"), rest):
        yield QuantizeKey(arch, dtype, False, False, True, has_up, format, rounding)


def quantizations_of_rows():
    for dtype, (has_up, format) in product(
        (BF16, F16), ((False, nv.FP8_1x128), (True, nv.FP8_1x128), (True, nv.FP8_1xK), (True, nv.INT8))
    ):
        yield QuantizeKey("sm_90a", dtype, False, False, False, has_up, format)


def of_names(arch, names, *rest, **options):
    return grouped(arch, map(KernelConfig.from_name, names), *rest, **options)


CHAINS = ("t128x64x256_s0a4_swap_p3", "t128x64x256_s2a2_2cta_swap_p4", "t128x128x256_s0a2_p4")
SETS = {
    "sm_100": lambda: (
        key
        for arch in sm100.ARCHS
        for key in grouped(arch, [KernelConfig()], (F16, BF16, F32), ("list",), groups=2)
    ),
    "sm_120": lambda: (
        key
        for arch in sm120.ARCHS
        for key in grouped(arch, [sm120.DEFAULT_CONFIG], (F16, F32), ("list",), groups=2)
    ),
    "sm_120, every tile": lambda: grouped(
        "sm_120a", [*sm120.CANDIDATES, *cases.SM120_TILES], (F16,), BOTH, groups=2
    ),
    "chains": lambda: of_names("sm_100a", CHAINS, ("nvfp4",), ("list",), groups=18, is_chain=True),
    "pairs of formats": chosen_for_every_pair,
    "bias": with_a_bias,
    "dual, one weight": dual_of_one_weight,
    "dual, one weight, sm_100": dual_of_one_weight_on_sm100,
    "quantized results": quantized_results,
    "FP8 results": fp8_results,
    "FP8 on sm_90": fp8_on_sm90,
    "FP8 on sm_100": fp8_on_sm100,
    "FP8 on sm_120": fp8_on_sm120,
    "INT8": int8,
    "MX on sm_90": mx_on_sm90,
    "weight-only": lambda: weight_only(nv.NVFP4, (BF16, F16), (None,), BF16),
    "weight-only, dual": lambda: weight_only(nv.NVFP4, gates=(Gate("silu", 7.0, "separate"),)),
    "weight-only, other formats": weight_only_formats,
    "few 16-bit rows": lambda: few_rows_times([nv.NVFP4], (BF16,), simt.ARCHS),
    "few 16-bit rows, other formats": few_rows,
    "few rows": lambda: (FewRowsKey("sm_90a", F32, has_alpha) for has_alpha in (False, True)),
    "gemv": lambda: (GemvKey(arch, BF16, True) for arch in simt.ARCHS if not is_weight_only(arch)),
    "quantize": quantizations,
    "quantize to MX": quantizations_to_mx,
    "quantize rows": quantizations_of_rows,
}
FAST = {
    "sm_100": 1, "sm_120": 1, "sm_120, every tile": 2, "chains": 1, "pairs of formats": 1, "dual, one weight, sm_100": 1,
    "FP8 on sm_90": 1, "FP8 on sm_100": 1, "weight-only": 1, "weight-only, dual": 1, "few 16-bit rows": 1, "few rows": 2,
    "gemv": 2, "quantize": 1, "quantize to MX": 1, "quantize rows": 2,
}  # fmt: skip
"""The fast tests check this many variants of a set, from the first one on. Other tests compile some of them as well."""


def threads_of(key, kernel):
    """Threads that have to fit an SM together."""
    match key:
        case GemvKey():
            return simt.gemv_spread(key.arch).ctas_per_sm * simt.GEMV_WARPS * simt.WARP_SIZE
        case FewRowsKey():
            return 2 * simt.FEW_ROWS_WARPS * simt.WARP_SIZE
        case W4A16Key():
            return key.blocks_per_sm * simt.W4A16_WARPS * simt.WARP_SIZE
        case QuantizeKey() if key.is_blocked:
            return 2 * simt.QUANTIZE_WARPS * simt.WARP_SIZE
    return int(re.search(r"\.(?:reqntid|maxntid) (\d+)", kernel.ptx)[1])


def check(key):
    key = key() if isinstance(key, partial) else key
    kernel = get_kernel(key.validated() if hasattr(key, "validated") else key)
    name, spilled = key.to_name(), 0
    is_weight_only = isinstance(key, KernelKey) and not key.a_format.has_scales
    is_eight_bit = isinstance(key, KernelKey) and (key.a_format, key.b_format) in (FP8, INT8)
    if is_eight_bit and (key.arch, key.form, key.out_dtype) == ("sm_90a", "list", F32):
        spilled = SPILLS.get(key.config.to_name(), 0) if key.activation else 0
    assert kernel.resources.stack_bytes == spilled, name
    assert kernel.resources.registers * threads_of(key, kernel) <= 65536, name
    assert b"__cuda_syscall" not in kernel.cubin, name
    # Warps read the stages of these kernels; tensor cores read those of others. test_stage_release has those of sm_90a in 4 bits.
    if isinstance(key, KernelKey) and (key.arch in sm120.ARCHS or is_eight_bit and key.arch == "sm_90a"):
        stages = (kernel.key.config.num_ab_stage,)
        assert not [str(finding) for finding in unfinished_reads(kernel.cubin, stages, "nvfp4_")], name
    if is_weight_only and key.activation is None and key.b_format == nv.NVFP4:
        assert_mmas_overlap(kernel.cubin)


@pytest.mark.parametrize("name", FAST)
def test_some_variants(name):
    for key in islice(SETS[name](), FAST[name]):
        check(key)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SETS)
def test_every_variant(name):
    for key in SETS[name]():
        check(key)
