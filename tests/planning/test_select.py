"""The chosen config and its estimates, for the competition's problems and at the limits."""

import math
import random
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from nvfp4_cute.compile.simt_keys import FewRowsKey, GemvKey
from nvfp4_cute.errors import UnsupportedProblem, UnsupportedTarget
from nvfp4_cute.formats.block_format import BFLOAT16, INT8_PAIR, MXFP4_FP8, NVFP4, NVFP4_PAIR, FP8_1xK
from nvfp4_cute.launch import grouped
from nvfp4_cute.planning.arch import (
    ARCHS,
    FAMILIES,
    family_of,
    fp8,
    is_weight_only,
    simt,
    sm90,
    sm90_weight_only,
    warp_mma,
)
from nvfp4_cute.planning.arch.sm100 import limits as sm100
from nvfp4_cute.planning.arch.sm100.choosing import config_for_rows, estimates
from nvfp4_cute.planning.choose import candidates, choose_config, explain, problem_of_mean, ranked
from nvfp4_cute.planning.config import KernelConfig
from nvfp4_cute.planning.schedule import make_schedule
from nvfp4_cute.problem import Gate, GroupedProblem
from nvfp4_cute.problems.nvfp4_dual_gemm import spec as dual_spec
from nvfp4_cute.problems.nvfp4_group_gemm.spec import BENCHMARKS

NUM_SMS = 148


def problem(sizes, out_m_major=False):
    return GroupedProblem(tuple(sizes), "list", torch.float16, False, out_m_major)


def config_for_mean(arch, num_sms, *groups_and_mean, **options):
    return choose_config(problem_of_mean(*groups_and_mean, **options), arch, num_sms)


@pytest.mark.parametrize("config", sm100.CANDIDATES, ids=str)
def test_every_candidate_can_be_built(config):
    assert sm100.unsupported_reason(config) is None


@pytest.mark.parametrize("config", sm100.DUAL_CANDIDATES, ids=str)
def test_every_dual_candidate_can_be_built(config):
    assert sm100.unsupported_reason(config, 2) is None


@pytest.mark.parametrize("case", dual_spec.BENCHMARKS, ids=lambda case: case.name)
def test_dual_benchmarks_share_one_a_between_two_ctas_in_one_wave(case):
    """The best published kernels make the same choice: pairs, with tiles as narrow as one wave allows."""
    dual = GroupedProblem(((case.m, case.n, case.k),), out_dtype=torch.float16, activation="silu")
    best = estimates(dual, NUM_SMS)[0]
    assert best.config.use_2cta_instrs and not best.config.swap_ab and best.waves == 1
    pairs = NUM_SMS // 2
    narrowest = min(n for n in sm100.TILES_N if case.m // 256 * -(-case.n // n) <= pairs)
    assert best.config.cta_tile_shape_mnk[1] == narrowest


@pytest.mark.parametrize("case", BENCHMARKS, ids=lambda case: str(case.sizes[0][1:]))
@pytest.mark.parametrize("out_m_major", [False, True])
def test_work_of_the_competition_is_dealt_evenly(case, out_m_major):
    """Compares the busiest CTA's tiles with the mean of all CTAs; no tile is computed twice."""
    chosen = choose_config(problem(case.sizes, out_m_major), "sm_100a", NUM_SMS)
    schedule = make_schedule(case.sizes, chosen.work_tile_mnk, chosen.num_cta // chosen.cluster_size)
    assert schedule.imbalance <= 1.12
    assert chosen.num_cta <= NUM_SMS
    assert chosen.num_cta == schedule.num_cta * chosen.cluster_size


def test_all_sms_ask_where_memory_bounds_unless_too_few_do_in_the_last_wave():
    """Modelled times of a B200, with 148 CTAs and with the fewest that balance the work: 14.39 and 14.48 us; 25.05 and 24.40."""
    num_cta = lambda case, name: next(
        e.config.num_cta
        for e in estimates(problem(BENCHMARKS[case].sizes), NUM_SMS)
        if replace(e.config, num_cta=None).to_name() == name
    )
    assert num_cta(1, "t128x128x256_s0a3_2cta_swap") == 148
    assert num_cta(0, "t128x256x256_s0a2_2cta_swap") == 128


def test_tiles_that_memory_waits_for_now_and_then_are_not_chosen():
    """Modelled times of a B200: 24.18 us with 192 tokens per tile, and 24.40 with 256, whose loads take nearly as long as memory."""
    assert choose_config(problem(BENCHMARKS[0].sizes), "sm_100a", NUM_SMS).cta_tile_shape_mnk[1] == 192


def test_few_tokens_go_to_the_fine_side():
    """Decoding: 8 tokens per expert fill a quarter of the smallest tile, and an eighth of a tile's M side."""
    config = choose_config(problem([(8, 4096, 7168)] * 32), "sm_100a", NUM_SMS)
    assert config.swap_ab and config.cta_tile_shape_mnk[1] <= 64


def test_results_run_across_lanes_where_sizes_leave_the_choice():
    """A slice whose runs cross the lanes of a warp is stored slightly earlier than one whose runs are within lanes."""
    sizes = [(128, 4096, 1536), (384, 4096, 1536)]
    assert choose_config(problem(sizes), "sm_100a", NUM_SMS).swap_ab
    assert not choose_config(problem(sizes, out_m_major=True), "sm_100a", NUM_SMS).swap_ab


@pytest.mark.parametrize(
    ("size", "splits"),
    [
        ((8, 1024, 8192), (4, 8)),
        ((1, 1024, 16384), (4, 8)),
        ((128, 4096, 7168), (2,)),
        ((1, 28672, 8192), (1,)),
        ((8, 7168, 16384), (2,)),
        ((128, 7168, 2048), (1,)),
        ((4096, 4096, 4096), (1,)),
    ],
    ids=str,
)
def test_k_is_split_where_tiles_leave_sms_idle_that_memory_could_feed(size, splits):
    """Modelled times of a B200 for the first: 9.06 us with whole tiles, and 6.63 with 4 CTAs per tile."""
    config = choose_config(problem([size]), "sm_100a", NUM_SMS)
    assert config.split_k in splits and config.num_cta <= NUM_SMS
    assert choose_config(replace(problem([size]), is_chain=True), "sm_100a", NUM_SMS).split_k == 1


def test_estimates_are_sorted_and_explained():
    found = estimates(problem([(300, 512, 1024)]), NUM_SMS)
    for is_split in (False, True):
        times = [e.cycles for e in found if (e.config.split_k > 1) == is_split]
        assert times == sorted(times)
    assert len(found) == len(sm100.CANDIDATES)
    lines = explain(problem([(300, 512, 1024)]), "sm_100a", NUM_SMS).splitlines()
    assert lines[0].startswith(found[0].config.to_name()) and "bound by" in lines[0]


def test_a_problem_without_tiles_has_a_config():
    assert choose_config(problem([(0, 64, 256)]), "sm_100a", NUM_SMS).num_cta >= 1


@pytest.mark.parametrize("sizes", [[(64, 64, 256)], [(300, 512, 1024)]], ids=str)
def test_every_family_chooses_for_itself(sizes):
    chosen = {arch: choose_config(problem(sizes), arch, 170) for arch in ARCHS}
    assert all(family_of(arch).unsupported_reason(config) is None for arch, config in chosen.items())
    # Both architectures with tensor memory make the same choice if the MMAs that only one of them has do not matter.
    alike = chosen["sm_100a"] == chosen["sm_103a"]
    assert len(set(chosen.values())) == sum(NVFP4_PAIR in family.MMA for family in FAMILIES) - alike


@pytest.mark.parametrize(
    ("rows", "tile_n"), [(1, 64), (64, 64), (65, 128), (128, 128), (190, 192), (300, 192), (5000, 256)]
)
def test_unknown_sizes_are_planned_for_their_mean(rows, tile_n):
    config = config_for_rows(rows, 4096)
    assert config.cta_tile_shape_mnk[1] == tile_n and config.swap_ab and config.use_2cta_instrs
    assert sm100.unsupported_reason(config) is None
    assert not config_for_rows(rows, 128).use_2cta_instrs


@pytest.mark.parametrize(
    ("rows", "num_b", "expected"),
    [
        (256, 1, "t128x256x256_s0a2"),  # modelled on a B200 with 256 groups of 196 to 310 rows, 1024 x 2048: 75.2 us, 81.8 in pairs
        (767, 2, "t128x128x256_s0a2_2cta_swap"),
        (1024, 2, "t128x128x256_s0a2_2cta"),  # 4 groups of 980 to 1,060 rows, 2048 x 4096: 28.9 us, 33.5 with tokens on N
    ],
)  # fmt: skip
def test_tokens_are_on_m_where_tiles_of_weights_take_less_time(rows, num_b, expected):
    config = config_for_rows(rows, 1024, num_b)
    assert config.to_name() == expected and sm100.unsupported_reason(config, num_b) is None
    assert config_for_rows(rows, 128, num_b).swap_ab


def test_tokens_are_on_n_if_k_is_long():
    # 18 groups of 159 to 295 rows, 4096 x 7168, modelled on a B200: 55.5 us, 62.9 with tokens on M.
    config = config_for_mean("sm_100a", NUM_SMS, 18, (227, 4096, 7168))
    assert replace(config, num_cta=None).to_name() == "t128x192x256_s0a2_2cta_swap"
    assert not config_for_mean("sm_100a", NUM_SMS, 18, (227, 7168, 2048)).swap_ab


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_every_choice_is_a_candidate(arch):
    found = {
        replace(choose_config(problem([(rows, 1024, 1024)]), arch, NUM_SMS), num_cta=None)
        for rows in (0, 1, 9, 40, 100, 130, 500)
    }
    assert len(found) > 1 and found <= set(candidates(arch, "list"))


def test_candidates_of_groups_that_only_the_device_knows():
    found = {config_for_rows(rows, n) for rows in range(1000) for n in (128, 256, 4096)}
    tried = set(candidates("sm_100a", "ragged"))
    assert found == {config for config in tried if config.split_k == 1}
    chosen = {
        config_for_mean("sm_100a", NUM_SMS, groups, (rows, n, 16384))
        for groups in (1, 2, 4, 16)
        for rows in (1, 64, 128, 200)
        for n in (128, 1024, 2048)
    }
    assert chosen <= tried and {config.split_k for config in chosen} == {1, 2, 4, 8}


@pytest.mark.parametrize("seed", range(20))
def test_splitting_k_makes_no_second_wave_however_the_rows_are_dealt(seed):
    rng = random.Random(seed)
    groups, rows, n = rng.randint(1, 12), rng.randint(1, 400), 128 * rng.randint(1, 16)
    config = config_for_mean("sm_100a", NUM_SMS, groups, (-(-rows // groups), n, 16384))
    for _ in range(20):
        cuts = sorted(rng.choices(range(rows + 1), k=groups - 1))
        sizes = [(end - start, n, 16384) for start, end in pairwise([0, *cuts, rows])]
        tiles = make_schedule(sizes, config.work_tile_mnk, NUM_SMS).num_tiles
        assert config.split_k == 1 or tiles * config.split_k <= NUM_SMS


def test_k_is_not_split_where_tiles_fill_the_sms_or_k_is_short():
    assert config_for_mean("sm_100a", NUM_SMS, 8, (16, 512, 7168)).split_k > 1
    assert config_for_mean("sm_100a", NUM_SMS, 8, (16, 4096, 7168)).split_k == 1
    assert config_for_mean("sm_100a", NUM_SMS, 8, (16, 512, 512)).split_k == 1


def test_few_live_experts_divide_k_and_leave_room_for_the_next_launch():
    """Eight of 256 experts have a row; modelled on a B200, their first product takes 5.5 us, and 6.9 with whole tiles."""
    first = {"gate": Gate("silu", None, "separate"), "out_format": NVFP4, "num_rows": 8}
    config = config_for_mean("sm_100a", NUM_SMS, 256, (1, 512, 2048), **first)
    assert config == KernelConfig((128, 64, 256), split_k=2, swap_ab=True)
    assert config in candidates("sm_100a", "ragged", gate=first["gate"])
    second = config_for_mean("sm_100a", NUM_SMS, 256, (1, 2048, 512), num_rows=8)
    assert second == KernelConfig((128, 64, 256), 2, 1, use_2cta_instrs=True, swap_ab=True)
    for num_rows in (None, 256):
        many = config_for_mean("sm_100a", NUM_SMS, 256, (1, 512, 2048), **first | {"num_rows": num_rows})
        assert many == KernelConfig((128, 64, 256), use_2cta_instrs=True, swap_ab=True)
    in_one_order = replace(problem_of_mean(256, (1, 512, 2048), num_rows=8), batch_invariant=True)
    assert choose_config(in_one_order, "sm_100a", NUM_SMS).split_k == 1


@pytest.mark.parametrize(
    ("groups", "mean", "rows"),
    [
        (
            2,
            (256, 3072, 4096),
            128,
        ),  # modelled on a B200 with 320 and 192 rows: 8.97 us, 10.76 us with tiles of 256
        (2, (256, 4096, 1536), 128),  # 6.70, 7.66
        (8, (256, 2048, 1024), 128),  # 7.30, 7.52
        (8, (128, 4096, 7168), 192),  # 25.80, 28.34 with tiles of 128: groups of 80 to 248 rows
        (8, (128, 7168, 2048), 128),  # 15.56, 16.53 with tiles of 192
        (8, (128, 4096, 2048), 128),  # 10.98, 11.08
        (256, (320, 512, 2048), 192),
    ],
)
def test_few_groups_of_unknown_sizes_have_the_tile_of_the_least_estimate(groups, mean, rows):
    assert config_for_mean("sm_100a", NUM_SMS, groups, mean).work_tile_mnk[0] == rows


def test_few_tiles_of_a_dual_gemm_are_those_of_the_least_estimate():
    """Modelled on a B200 with groups of 95 to 156 rows: 11.3 us with tiles of 64 rows, and 13.5 with 128."""
    gate = Gate("silu", None, "separate")
    config = config_for_mean("sm_100a", NUM_SMS, 32, (128, 512, 1024), gate=gate, out_format=NVFP4)
    assert config.work_tile_mnk[0] == 64


@pytest.mark.parametrize("seed", range(10))
def test_tiles_are_dealt_out_only_where_their_sum_leaves_a_chance(monkeypatch, seed):
    rng = random.Random(seed)
    n, k = rng.choice([256, 4096, 28672]), rng.choice([512, 4096])
    sizes = [
        (rng.choice([0, rng.randint(1, 40), rng.randint(1, 600)]), n, k) for _ in range(rng.randint(1, 40))
    ]
    modelled_us, dealt = sm90._modelled_us, []

    def recorded_us(live, config, num_sms, is_dealt):
        dealt.append(is_dealt)
        return modelled_us(live, config, num_sms, is_dealt)

    monkeypatch.setattr(sm90, "_modelled_us", recorded_us)
    chosen = sm90.choose(problem(sizes), 132)
    assert dealt.count(True) < dealt.count(False)
    monkeypatch.setattr(sm90, "_modelled_us", lambda *args: modelled_us(*args[:-1], True))
    assert sm90.choose(problem(sizes), 132) == chosen


def test_ragged_groups_are_planned_for_sizes_that_differ():
    mean, groups = (128, 4096, 7168), 8
    ragged, masked = (
        config_for_mean("sm_90a", 132, groups, mean, is_ragged=is_ragged) for is_ragged in (True, False)
    )
    # Whole tiles of 128 rows are best if every group has 128, but a larger group would need two.
    assert masked == sm90.choose(problem([mean] * groups), 132) and masked.work_tile_mnk[0] == 128
    assert ragged.stream_k and ragged.work_tile_mnk[0] > 128
    assert config_for_mean("sm_90a", 132, 1, mean) == sm90.choose(problem([mean]), 132)


def test_groups_with_few_rows_of_long_k_are_dealt_to_the_k_tile():
    """Some may have no rows, so that whole tiles would leave most SMs idle in the last wave."""
    assert config_for_mean("sm_90a", 132, 8, (2, 4096, 14336)).stream_k


@pytest.mark.parametrize("rows", [66, 100, 140])
def test_tiles_hold_groups_that_another_kind_has_a_tile_of_just_so_many_rows_for(rows):
    """Tiles of 80, 112 and 160 rows exist only in kernels that decode tokens themselves; the others are faster here."""
    chosen = sm90.choose(problem([(rows, 7168, 2048)] * 8), 132)
    assert chosen.decode_first and chosen.work_tile_mnk[0] >= rows


@pytest.mark.parametrize("spread", [sm90._even_choice, sm90._uneven_choice])
@pytest.mark.parametrize(("mean", "groups"), [(1, 64), (5, 7), (128, 8), (700, 2)])
def test_planned_sizes_have_the_mean_and_differ(spread, mean, groups):
    sizes = sm90._spread([(mean, 256, 512)] * groups, spread)
    rows = [m for m, n, k in sizes if (n, k) == (256, 512)]
    assert len(rows) == groups and abs(sum(rows) - mean * groups) <= groups / 2
    assert min(rows) < mean < max(rows)
    # The largest value of an exponential distribution is far from its mean, like the largest group of uneven routing.
    assert (max(rows) > 2 * mean) == (spread is sm90._uneven_choice and groups > 2 or mean == 1)
    if groups > 2:
        assert rows != sorted(rows) and rows != sorted(rows, reverse=True)


@pytest.mark.parametrize("rows", [1, 10, 80, 300])
def test_fewer_rows_than_groups_reach_fewer_groups(rows):
    """Uniform routing leaves few experts with two rows; uneven routing gives a few experts many rows."""
    groups = 512
    sizes = [(1, 256, 512)] * rows + [(0, 256, 512)] * (groups - rows)
    found = {}
    for spread in (sm90._even_choice, sm90._uneven_choice):
        found[spread] = [m for m, _, _ in sm90._spread(sizes, spread)]
        assert abs(sum(found[spread]) - rows) <= max(rows / 8, 2)
    live = sum(m > 0 for m in found[sm90._even_choice])
    assert live == pytest.approx(groups * (1 - math.exp(-rows / groups)), rel=0.05, abs=1)
    assert sum(m > 0 for m in found[sm90._uneven_choice]) <= live


def test_layers_of_many_small_experts():
    """With few rows and short K, the product dequantizes tokens (512 experts and columns, measured on an H200)."""
    for rows in (10, 80, 320):
        config = config_for_mean("sm_90a", 132, 512, (1, 2048, 512), num_rows=rows)
        assert (config.decode_first, config.work_tile_mnk[0]) == (False, 8)
    assert config_for_mean("sm_90a", 132, 512, (10, 2048, 512)).decode_first


def test_a_launch_is_planned_for_the_rows_there_are(monkeypatch):
    """A launch with fewer rows than groups is not planned for one row per group."""
    seen = []
    monkeypatch.setattr(grouped, "config_of", lambda *args: seen.append(args[3]) or KernelConfig())
    monkeypatch.setattr(grouped.tuned, "find", lambda *args: None)
    for tokens, groups in ((3, 16), (20, 64), (16, 16), (40, 8)):
        operands = SimpleNamespace(a=(SimpleNamespace(rows=tokens),))
        task = grouped.GroupedTask(
            SimpleNamespace(form="ragged", num_groups=groups, a_format=NVFP4), operands
        )
        task.config_on(SimpleNamespace(arch="sm_90a", num_sms=132))
    assert seen == [3, 24, None, None]


@pytest.mark.parametrize("mean", [(0, 256, 256), (1, 256, 256), (3, 64, 32)])
def test_few_rows_for_many_groups_have_a_config(mean):
    for is_ragged in (True, False):
        assert config_for_mean("sm_90a", 132, 40, mean, is_ragged=is_ragged) in sm90.candidates()


REFUSED = (
    ("nvfp4", None, fp8.PAIR, "GEMM"), ("mxfp8_e4m3", "silu", fp8.PAIR, "dual GEMM"),
    (torch.bfloat16, "silu", INT8_PAIR, "dual GEMM"),
)  # fmt: skip


@pytest.mark.parametrize(("dtype", "activation", "pair", "what"), REFUSED, ids=str)
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_110a", "sm_120a"])
def test_results_that_no_kernel_writes_are_refused(arch, dtype, activation, pair, what):
    """Every architecture refuses them by name, before anything is compared."""
    a, b = pair
    sizes = ((64, 256, 512),)
    asked = GroupedProblem(sizes, out_dtype=dtype, activation=activation, a_format=a, b_format=b)
    for choose in (choose_config, ranked, explain):
        with pytest.raises(UnsupportedProblem, match=f"{arch} has no {what} of {a} x {b}"):
            choose(asked, arch, NUM_SMS)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89"])
def test_two_quantized_operands_are_refused_before_hopper_with_the_fix(arch):
    assert is_weight_only(arch) and not is_weight_only("sm_90a")
    with pytest.raises(
        UnsupportedTarget, match=f'{arch}: no kernel multiplies two quantized.*activations="16bit"'
    ):
        family_of(arch)
    for key in (GemvKey, FewRowsKey):
        with pytest.raises(UnsupportedTarget, match=arch):
            key(arch, torch.bfloat16, False)
    assert not simt.has_fp4_convert(arch)


@pytest.mark.parametrize(
    "n, is_dense, expected",
    [(6144, True, 2), (8448, True, 2), (8576, True, 1), (6144, False, 1)],
)
def test_two_parts_of_k_run_at_once(n, is_dense, expected):
    """132 SMs hold both parts of 66 tiles of 128 weights; groups, and problems outside of the mode, have no fixed parts."""
    for rows in (1, 4096):
        one = GroupedProblem(((rows, n, 4096),), batch_invariant=True, is_dense=is_dense)
        assert sm90.parts_of_k(one, 132) == expected
        assert sm90.parts_of_k(replace(one, batch_invariant=False), 132) == 0


def test_families_of_16_bit_rows():
    """A pair of formats and a config name one family, whether ``a`` is quantized or not."""
    pair, by_warps = (BFLOAT16, NVFP4), warp_mma.DEFAULT_CONFIG
    assert family_of("sm_80", pair) is family_of("sm_120a", pair) is warp_mma
    assert family_of("sm_90a", pair) is sm90_weight_only and family_of("sm_90a", pair, by_warps) is warp_mma
    assert family_of("sm_90a", (FP8_1xK, MXFP4_FP8)) is sm90_weight_only and family_of("sm_90a") is sm90
    found = candidates("sm_90a", "list", formats=pair)
    assert set(found) == {*sm90_weight_only.CANDIDATES, *warp_mma.CANDIDATES}
    with pytest.raises(UnsupportedTarget, match="sm_80: no kernel multiplies two quantized operands"):
        family_of("sm_80")
    with pytest.raises(
        UnsupportedProblem, match="no kernel for 16-bit a x fp8_1xk .there is one for 16-bit a x nvfp4"
    ):
        choose_config(GroupedProblem(((8, 128, 128),), a_format=BFLOAT16, b_format=FP8_1xK), "sm_90a", 132)
