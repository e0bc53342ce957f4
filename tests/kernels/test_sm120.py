"""The sm_120a grouped GEMM: machine code, and execution on the emulator compared with the float64 reference."""

import re

import cases
import pytest
import torch
from grouped_gemm_check import check, run
from oracle import assert_bitwise_equal

from nvfp4_cute import KernelConfig
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.emulator.cubin import read_opcodes
from nvfp4_cute.gpus import verdicts
from nvfp4_cute.gpus.targets import RTX_PRO_6000
from nvfp4_cute.planning.arch import sm120
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.problems.nvfp4_group_gemm import adapter, inputs, reference, spec
from nvfp4_cute.roofline.modelled import modelled_times

EMULATOR = "emulator:sm_120a"
# Opcode that nvdisasm prints as OMMA, the block-scaled MMA of 4-bit operands.
OMMA = 0x47F
MOV = 0x202
# K blocks in a tile's code: all but the last of the first stage, both of every other stage, and the last one.
BLOCKS = 1 + 2 + 1
# MMAs of a warp, 2 x 8 per K block.
MMAS = BLOCKS * 2 * 8
# Two tiles along M and N, more K tiles than stages, sums that are not exact.
SHAPES = cases.Case("shapes", ((130, 136, 512), (1, 40, 896)), seed=11, kind="wide")
QUICK = (
    "tiles_3x2",
    "ragged_small_m",
    "n_tail_odd",
    "k_tail",
    "k_pitched",
    "empty_first",
    "nan_padding_wide",
)


def compiled(arch="sm_120a", config=sm120.DEFAULT_CONFIG, dtype=torch.float16, form="list"):
    return get_kernel(KernelKey(arch, config, 2 if form == "list" else 1, dtype, True, form).validated())


# ---- machine code ------------------------------------------------------------------------------------------------------


def test_the_machine_code_is_block_scaled_mmas():
    """Every MMA of the PTX is one instruction, so operands are not decoded to a wider type."""
    kernel = compiled()
    mma = r"mma\.sync\.aligned\.m16n8k64\.row\.col\.kind::mxf4nvf4\.block_scale\.scale_vec::4X\.f32\.e2m1\.e2m1\.f32\.ue4m3"
    assert len(re.findall(mma, kernel.ptx)) == kernel.ptx.count("mma.sync") == MMAS
    assert read_opcodes(kernel.cubin).count(OMMA) == MMAS


@pytest.mark.parametrize("num_acc_stage", [1, 2])
def test_sums_stay_where_the_mma_wants_them(num_acc_stage):
    """If sums were cleared together, LLVM would keep them as pairs, which the assembler moves twice every K tile: 145 moves."""
    kernel = compiled(config=KernelConfig((128, 128, 128), num_acc_stage=num_acc_stage))
    assert read_opcodes(kernel.cubin).count(MOV) < 32


def test_a_scale_word_serves_four_rows_of_a_quad():
    """A K block has one load for the rows of a warp, and one for each half of its columns."""
    ptx = compiled().ptx
    assert len(re.findall(r"ld\.shared\.b32", ptx)) == BLOCKS * (1 + 2)
    assert ptx.count("ldmatrix.sync.aligned.m8n8.x4") == BLOCKS * (2 + 4)


def test_stages_fill_shared_memory():
    plan = sm120.smem_plan(sm120.resolve(sm120.DEFAULT_CONFIG))
    assert (plan.a_stage_bytes, plan.b_stage_bytes, plan.sfa_stage_bytes, plan.sfb_stage_bytes) == (
        8192,
        8192,
        1024,
        1024,
    )
    assert plan.total_bytes <= 101376 < plan.total_bytes + plan.stage_bytes


@pytest.mark.parametrize(
    ("config", "fix"),
    [
        (KernelConfig((64, 128, 128), num_acc_stage=1), "use M tile 128"),
        (KernelConfig((128, 96, 128), num_acc_stage=1), "use an N tile of 8, 16, 32, 64, 128"),
        (KernelConfig((128, 128, 64), num_acc_stage=1), "use K tile 128 or 256"),
        (KernelConfig((128, 128, 128), num_acc_stage=3), "use 1, or 2 for two teams"),
        (KernelConfig((128, 128, 128), 6, num_acc_stage=1), "use 2 to 5"),
        (
            KernelConfig((128, 128, 128), num_acc_stage=2, split_k=2),
            "hold 1 of 2 stages; use a smaller N tile",
        ),
        (KernelConfig((128, 128, 128), num_acc_stage=1, num_cta=0), "at least 1 CTA"),
        (KernelConfig((128, 8, 256), num_acc_stage=1, split_k=4, num_cta=3), "at least 4 CTAs"),
        (KernelConfig((128, 8, 256), num_acc_stage=1, split_k=3), "use split_k=2, or 1"),
        (KernelConfig((128, 128, 128), num_acc_stage=1, split_k=8), "hold 0 of 2 stages"),
    ],
    ids=lambda value: value.to_name() if isinstance(value, KernelConfig) else "",
)
def test_a_refusal_names_the_nearest_legal_value(config, fix):
    assert fix in sm120.unsupported_reason(config)


# ---- execution ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "case",
    [case if case.name in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in cases.ALL],
    ids=lambda case: case.name,
)
def test_case(case):
    check(case, backend=EMULATOR)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", cases.SM120_TILES, ids=KernelConfig.to_name)
def test_small_tiles(config):
    check(
        cases.Case("tiles", ((130, 136, 288), (40, 33, 512)), has_alpha=True, padding="nan"), config, EMULATOR
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [None, KernelConfig((128, 64, 256), 2, 2, 3)], ids=str)
@pytest.mark.parametrize("mode", ["eager", "lazy", "random:1"])
def test_same_bits_whenever_asynchronous_operations_happen(mode, config):
    """Also checks for hazards."""
    operands = cases.make_operands(SHAPES)
    expected = run(SHAPES, operands, EMULATOR, config)
    with observe(mode=mode, check=True):
        actual = run(SHAPES, operands, EMULATOR, config)
    for got, want in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, want, mode=mode)


@pytest.mark.slow
def test_same_bits_for_every_number_of_ctas_and_stages():
    operands = cases.make_operands(SHAPES)
    expected = run(SHAPES, operands, EMULATOR)
    for num_cta, num_ab_stage in [(1, 2), (3, 3)]:
        config = KernelConfig((128, 128, 128), num_ab_stage, 1, num_cta)
        for got, want in zip(run(SHAPES, operands, EMULATOR, config), expected, strict=True):
            assert_bitwise_equal(got, want, config=config.to_name())


def test_gb10_gives_the_same_bits():
    check(cases.Case("arch", ((130, 72, 512), (40, 128, 288)), seed=5), backend="emulator:sm_121a")


# ---- bank conflicts ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", [sm120.DEFAULT_CONFIG, *cases.SM120_TILES], ids=KernelConfig.to_name)
def test_shared_memory_is_read_without_bank_conflicts(config):
    case = cases.Case("banks", ((130, 136, 512),))
    with observe(count_banks=True) as observer:
        run(case, cases.make_operands(case), EMULATOR, config)
    use = observer.stats[0].banks
    loads = [place for place in use if "ldmatrix" in place or "ld.shared.b32" in place]
    assert len(loads) >= 4
    assert not use.conflicts(), use.table()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["t128x64x128_s0a1", "t128x64x128_s0a1_swap", "t128x32x256_s0a2_swap"])
@pytest.mark.parametrize("m_major", [False, True])
def test_results_are_stored_in_whole_sectors(name, m_major):
    """Stores fill 32 bytes of a line at once, for either orientation of the output."""
    case = cases.Case("sectors", ((64, 128, 256),))
    operands, config = cases.make_operands(case), KernelConfig.from_name(name)
    (timing,) = modelled_times(lambda backend: run(case, operands, backend, config, m_major), RTX_PRO_6000)
    assert timing.stored_bytes == 64 * 128 * 2


# ---- choice ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_sms", "sizes", "name"),
    [
        (188, [(8, 4096, 4096)], "t128x8x256_s0a2_swap"),
        (188, [(32, 4096, 4096)], "t128x16x256_s0a2_swap"),
        (188, [(128, 4096, 4096)], "t128x32x128_s0a1"),
        (188, [(16, 512, 2048)] * 256, "t128x16x256_s0a2_swap"),
        (188, [(4096, 4096, 4096)], "t128x64x128_s0a1"),  # 11 waves of half a tile, not 6 whole ones
        (188, [(8192, 8192, 8192)], "t128x128x128_s0a2"),
        (
            170,
            [(2048, 2048, 2048)],
            "t128x32x128_s0a1",
        ),  # 7 waves of a quarter, not 4 of a half with two tiles in the last
        (170, [(1, 1024, 7168)], "t128x8x256_s0a1_swap_k8_p152"),  # 8 tiles: eight SMs share each
        (188, [(512, 512, 16384)], "t128x64x128_s0a1_swap_k4_p176"),
        (188, [(1024, 4096, 4096)], "t128x64x128_s0a1"),  # 256 tiles would be one wave and a bit
        (188, [(0, 64, 256)], "t128x128x128_s0a1"),
    ],
)
def test_a_tile_is_chosen_by_its_estimated_time(monkeypatch, num_sms, sizes, name):
    monkeypatch.setattr(verdicts, "is_proven", lambda arch, form: form == "split_k" and arch in sm120.ARCHS)
    assert sm120.choose(GroupedProblem(sizes), num_sms).to_name() == name


def test_k_is_not_split_before_the_machine_has_shown_what_it_takes(monkeypatch, tmp_path):
    """Off by default, and on once the probes of one GPU of the family have passed."""
    monkeypatch.setenv("NVFP4_CUTE_CACHE_DIR", str(tmp_path))
    sizes = ((1, 1024, 7168),)
    assert sm120.choose(GroupedProblem(sizes), 170).split_k == 1
    assert all(config.split_k == 1 for config in (*sm120.candidates(), *sm120.candidates(2)))
    passed = dict.fromkeys(verdicts.FORMS["split_k"], verdicts.PASSED)
    verdicts.store("NVIDIA GeForce RTX 5090", "sm_120a", {**passed, "st_async_v4": "fault"})
    assert sm120.choose(GroupedProblem(sizes), 170).split_k == 1
    verdicts.store("NVIDIA GeForce RTX 5090", "sm_120a", passed)
    assert sm120.choose(GroupedProblem(sizes), 170).split_k > 1


@pytest.mark.parametrize("config", sm120.CANDIDATES, ids=KernelConfig.to_name)
def test_every_candidate_can_be_built(config):
    assert sm120.unsupported_reason(config) is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("tokens", [5, 30, 50])
def test_the_chosen_config_is_right(tokens):
    check(
        cases.Case("few", ((tokens, 200, 544), (3, 33, 256)), has_alpha=True, padding="nan"), backend=EMULATOR
    )


# ---- the competition's shapes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        *spec.TESTS[:2],
        *(pytest.param(case, marks=pytest.mark.slow) for case in spec.TESTS[2:]),
        # Up to 60 GFLOP, which take minutes of processor time each.
        *(
            pytest.param(case, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])
            for case in spec.BENCHMARKS
        ),
    ],
    ids=lambda case: f"g{case.num_groups}_{case.sizes[0]}",
)
def test_competition_shape(case):
    data = inputs.make_inputs(case)
    outputs = adapter.custom_kernel(data, backend=EMULATOR)
    for got, want in zip(outputs, reference.reference(data), strict=True):
        assert_bitwise_equal(got, want)
