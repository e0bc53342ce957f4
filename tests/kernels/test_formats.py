"""Grouped GEMMs of operands in other formats than NVFP4, for every supported pair of a family, on the emulator."""

from contextlib import nullcontext
from dataclasses import replace

import flat_parts as on_parts
import pytest
import torch
from format_cases import NAN_CODES, Groups
from list_checks import check_list_operands
from oracle import assert_bitwise_equal

import nvfp4_cute as nv
from nvfp4_cute import KernelConfig, UnsupportedProblem
from nvfp4_cute.backends.emulator import observe, on_emulator
from nvfp4_cute.cli import compile
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.formats.block_format import MIXED_PAIRS, NVFP4_PAIR
from nvfp4_cute.gpus.targets import lookup
from nvfp4_cute.launch.grouped import GroupedTask
from nvfp4_cute.launch.prepared import PreparedCall
from nvfp4_cute.planning.arch import family_of, sm120
from nvfp4_cute.planning.arch.sm100 import limits
from nvfp4_cute.planning.choose import candidates
from nvfp4_cute.problem import Gate, GroupedProblem

PAIRS = [
    (arch, pair)
    for arch in ("sm_100a", "sm_120a", "sm_90a")
    for pair in family_of(arch).MMA
    if pair != NVFP4_PAIR and pair[0].scale_layout == "blocked"
]
PAIR_IDS = [f"{arch}-{a}-x-{b}" for arch, (a, b) in PAIRS]
every_pair = pytest.mark.parametrize(("arch", "pair"), PAIRS, ids=PAIR_IDS)
# A tail in every extent, an empty group, one and several K tiles, and K tiles and scale blocks that K fills only in
# part.
SIZES = ((130, 72, 288), (0, 64, 96), (5, 136, 640), (33, 1, 32))
DEVICE_SIZES = ((40, 136, 416), (0, 136, 416), (129, 136, 416))
# These configs have the K tile of NVFP4.
CONFIGS = {
    "sm_100a": (
        "t128x128x256_s0a2",
        "t128x64x256_s2a4_swap_p2",
        "t128x64x256_s0a4_2cta_swap",
        "t128x192x256_s2a2_2cta_p4",
        "t128x128x256_s3a2_2cta_m2_p8",
        "t128x256x256_s2a2_2cta_swap_p4",
        "t128x64x256_s0a2_swap_k2",
    ),
    "sm_120a": (
        "t128x128x128_s2a1_p2",
        "t128x64x128_s0a2_swap",
        "t128x32x256_s0a2_swap_p3",
        "t128x16x256_s0a1",
        "t128x8x256_s0a2_swap",
        "t128x32x256_s0a1_swap_k2",
    ),
    "sm_90a": (
        "t128x8x128_s0a1_swap_k2",
        "t128x112x128_s2a1_swap_p3",
        "t128x192x128_s0a1_swap",
        "t128x32x128_s0a1_swap_pre_p2",
        "t128x192x128_s0a1_swap_pre_sk",
    ),
}
PADS = tuple(arch for arch in CONFIGS if any(mma.element_bits == 8 for mma in family_of(arch).MMA.values()))
# One pair of each kind, and mixed pairs with 4-bit elements on either side.
SOME_PAIRS = (
    (nv.MXFP4, nv.MXFP4),
    (nv.MXFP8_E4M3, nv.MXFP8_E5M2),
    (nv.MXFP8_E4M3, nv.MXFP4),
    (nv.MXFP4, nv.MXFP8_E5M2),
)
MODES = ("eager", "lazy", "random:1")
EVERY_CONFIG = [
    pytest.param(arch, pair, name, MODES[(i + j) % 3], id=f"{arch}-{pair[0]}-x-{pair[1]}-{name}")
    for arch, names in CONFIGS.items()
    for i, pair in enumerate(SOME_PAIRS)
    for j, name in enumerate(names)
]


def groups_of(pair, sizes, seed):
    """Groups of similar sizes. K is a multiple of 128 if TMA pads one side."""
    if pair in MIXED_PAIRS:
        sizes = [(m, n, -(-k // 128) * 128) for m, n, k in sizes]
    return Groups.of(pair, sizes, seed)


def with_k_tile(arch, name, pair):
    """A config of ``CONFIGS`` with the K tile of a pair."""
    if arch not in PADS:
        return KernelConfig.from_name(name)
    family = sm120 if arch in sm120.ARCHS else limits
    return family.with_k_tile(KernelConfig.from_name(name), pair)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("arch", "pair", "name", "mode"), EVERY_CONFIG)
def test_every_tile_shape_is_right_and_clean(arch, pair, name, mode):
    """Bit-equal and without hazards in every mode of the emulator."""
    groups = groups_of(pair, SIZES, seed=1)
    with observe(mode=mode, check=True) as observer:
        groups.check("list", f"emulator:{arch}", with_k_tile(arch, name, pair))
    assert len(observer.stats) == 1 and not observer.hazards


# Every config that a product or a dual product of some pair may use.
EVERY_CANDIDATE = [
    pytest.param(
        arch,
        pair,
        config,
        gate is not None,
        id=f"{arch}-{pair[0]}-x-{pair[1]}-{config.to_name()}{'-dual' if gate else ''}",
    )
    for arch in CONFIGS
    for pair in SOME_PAIRS
    if pair in family_of(arch).MMA
    for gate in (None, Gate("relu2", None, "separate"))
    for config in candidates(arch, "list", gate=gate, formats=pair)
]


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("arch", "pair", "config", "dual"), EVERY_CANDIDATE)
def test_every_config_that_may_be_chosen_is_right(arch, pair, config, dual):
    """Tiles of every size have several K tiles and are followed by more rows.

    Tiles of over 128 rows have scales in two blocks.
    """
    groups_of(pair, ((150, 200, 416), (300, 72, 256)), seed=7).check("list", f"emulator:{arch}", config, dual)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", ["list", "ragged", "masked"])
@pytest.mark.parametrize("dual", [False, True])
@every_pair
def test_every_form_with_what_is_chosen(arch, pair, form, dual):
    sizes = SIZES if form == "list" else DEVICE_SIZES
    groups_of(pair, sizes, seed=2).check(form, f"emulator:{arch}", dual=dual)


@pytest.mark.slow
@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16])
@every_pair
def test_results_of_16_bits(arch, pair, out_dtype):
    groups_of(pair, SIZES, seed=3).check("list", f"emulator:{arch}", out_dtype=out_dtype)


@pytest.mark.slow
@every_pair
def test_results_whose_columns_are_contiguous(arch, pair):
    """Refused if a launch decodes the tokens before the product, because that kernel writes rows."""
    groups = groups_of(pair, SIZES, seed=3)
    decodes_first = arch == "sm_90a"
    with pytest.raises(UnsupportedProblem, match="columns") if decodes_first else nullcontext():
        groups.check("list", f"emulator:{arch}", m_major=True)


@pytest.mark.sampled(1)
@every_pair
def test_quantized_results(arch, pair):
    """The result is the float32 product in NVFP4, for the next layer."""
    groups = groups_of(pair, ((40, 96, 288), (0, 64, 96), (7, 64, 320)), seed=4)
    factors = [0.5, 1.0, 2.0]
    found = groups.run("list", f"emulator:{arch}", out_dtype="nvfp4", out_global_scale=factors)
    plain = groups.run("list", "reference")
    for got, x, factor in zip(found, plain, factors, strict=True):
        want = nv.quantize(x, global_scale=factor)
        assert torch.equal(got.data, want.data)
        assert_bitwise_equal(got.dequantize(), want.dequantize())


@pytest.mark.slow
@every_pair
def test_dense_products_and_batches(arch, pair):
    groups = groups_of(pair, ((70, 136, 288),) * 2, seed=5)
    x, w = groups.a[0], groups.b[0]
    backend, dtype = f"emulator:{arch}", torch.float32
    assert_bitwise_equal(nv.gemm(x, w, backend=backend, out_dtype=dtype), nv.gemm(x, w, out_dtype=dtype))
    parts = [
        (torch.stack([t.data for t in side]).permute(1, 2, 0), torch.stack([t.scale for t in side]))
        for side in (groups.a, groups.b)
    ]
    (a, a_scale), (b, b_scale) = parts
    given = (a, b, a_scale, b_scale)
    told = {"a_format": pair[0], "b_format": pair[1], "out_dtype": dtype}
    got = on_parts.gemm(*given, backend=backend, **told)
    for batch, (y, z) in enumerate(zip(groups.a, groups.b, strict=True)):
        assert_bitwise_equal(got[:, :, batch].contiguous(), nv.gemm(y, z, out_dtype=dtype))


@pytest.mark.sampled(1)
@every_pair
def test_a_scale_that_is_nan_reaches_its_row_alone(arch, pair):
    groups = groups_of(pair, ((40, 72, 288),), seed=6)
    plain = groups.run("list", "reference")[0]
    # The scale of the second block of row 3: atom [0, 0], row 3 of its first 32.
    groups.a[0].scale[0, 0, 3, 0, 1] = NAN_CODES[pair[0].scale.name]
    got = groups.run("list", f"emulator:{arch}")[0]
    assert bool(got[3].isnan().all())
    assert_bitwise_equal(got[4:], plain[4:])


@pytest.mark.parametrize("arch", PADS)
def test_what_tma_cannot_pad_is_refused_by_name(arch):
    pair, backend = (nv.MXFP8_E4M3, nv.MXFP4), f"emulator:{arch}"
    short = Groups.of(pair, ((40, 72, 96),))
    assert all(x.isfinite().all() for x in short.run("list", "reference"))
    with pytest.raises(
        nv.UnsupportedProblem, match=rf"^{arch}: b of MXFP4 has K=96.* pad K of both operands"
    ):
        short.run("list", backend)
    groups = Groups.of(pair, ((40, 72, 128),))
    x, w = groups.a[0], groups.b[0]
    apart, shifted = torch.empty(72, 80, dtype=torch.uint8), torch.empty(72 * 96 + 16, dtype=torch.uint8)
    given = {"a_format": pair[0], "b_format": pair[1], "backend": backend}
    for rows, wording in (
        (apart[:, :64], r"rows \(and batches\) \[80\] bytes apart"),
        (shifted[16:].view(72, 96)[:, :64], "all places multiples of 32 bytes"),
    ):
        rows.copy_(w.data)
        assert torch.equal(
            on_parts.gemm(x.data, rows, x.scale, w.scale, **given | {"backend": "reference"}), nv.gemm(x, w)
        )
        with pytest.raises(nv.UnsupportedProblem, match=wording):
            on_parts.gemm(x.data, rows, x.scale, w.scale, **given)


@every_pair
def test_every_candidate_can_be_built(arch, pair):
    family = family_of(arch)
    for num_b in (1, 2):
        for form in ("list", "ragged"):
            found = family.candidates(num_b, form=form, formats=pair)
            assert found and all(family.unsupported_reason(c, num_b, pair) is None for c in found)
    assert candidates(arch, "list", formats=pair)
    wrong = KernelConfig((128, 128, 2048), num_acc_stage=1, swap_ab=True)
    assert "use K tile" in family.unsupported_reason(wrong, 1, pair)


@every_pair
def test_a_name_tells_the_pair(arch, pair):
    a_format, b_format = pair
    problem = GroupedProblem(((64, 64, 256),), a_format=a_format, b_format=b_format)
    key = KernelKey.of(arch, family_of(arch).choose(problem, 148), problem)
    assert key.to_name().endswith(f"_{a_format}_x_{b_format}")


def test_keys_of_compile_are_of_the_formats():
    pair = (nv.MXFP8_E4M3, nv.MXFP4)
    silu = {"activation": "silu", "a_format": pair[0]}
    key = KernelKey("sm_100a", KernelConfig(), 1, torch.bfloat16, False, b_format=pair[1], **silu)
    found = list(compile.keys(("grouped_gemm", "grouped_dual_gemm"), key, (2,)))
    assert found and all((key.a_format, key.b_format) == pair for key in found)
    with pytest.raises(nv.UnsupportedProblem, match="sm_100a: no kernel for nvfp4 x mxfp4"):
        list(compile.keys(("grouped_gemm",), replace(key, a_format=nv.NVFP4), (2,)))


def test_a_repeated_call_asks_for_the_alignment_of_what_tma_pads():
    pair = (nv.MXFP8_E4M3, nv.MXFP4)
    groups, gpu = Groups.of(pair, ((40, 72, 128),)), lookup("sm_100a").gpu
    x, w, out = groups.a[0], groups.b[0], torch.empty(40, 72)
    problem, operands = check_list_operands(
        [x.data], [w.data], [x.scale], [w.scale], None, [out], out_dtype=torch.float32, a_format=pair[0], b_format=pair[1]
    )  # fmt: skip
    with on_emulator(target=lookup("sm_100a")):
        launch = GroupedTask(problem, operands).launch(gpu, for_emulator=True)
        assert launch.align_bytes == 32
        call = PreparedCall(launch, [tensor for _, tensor, _ in GroupedTask(problem, operands).tensors()], 1)
    room = torch.empty(72 * 96 + 64, dtype=torch.uint8)
    for shift, is_taken in ((32, True), (16, False)):
        moved = room[shift:].as_strided((72, 64), (96, 1))
        tensors = [x.data, moved, x.scale, w.scale, torch.empty(40, 72)]
        assert call.take(tensors, own_out=True) is is_taken
