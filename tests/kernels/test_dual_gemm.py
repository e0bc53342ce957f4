"""The dual GEMM of sm_100a and sm_120a on the emulator, compared with the float64 reference within its stated bound."""

import re
from dataclasses import replace
from itertools import product

import cases
import flat_parts as on_parts
import pytest
import torch
from flat_parts import dual_gemm, grouped_dual_gemm
from oracle import assert_bitwise_equal, bits, poisoned

from nvfp4_cute import ConfigError, KernelConfig, UnsupportedProblem
from nvfp4_cute.activation import NAMES, activation_of
from nvfp4_cute.backends.emulator import observe
from nvfp4_cute.compile.cache import get_kernel
from nvfp4_cute.compile.keys import KernelKey
from nvfp4_cute.formats.scale_layout import from_blocked
from nvfp4_cute.launch.plan import make_plan
from nvfp4_cute.planning.arch import base, sm90, sm100, sm120
from nvfp4_cute.problem import GroupedProblem
from nvfp4_cute.reference import grouped_dual_gemm_reference, grouped_gemm_reference

# Tiles that are partial on both sides, one row, an empty group, and several tiles per CTA, so that every accumulator is
# reused.
TILES = cases.Case("tiles", ((270, 264, 512), (1, 40, 768), (0, 50, 256)), 11)
SMALL = cases.Case("small", ((70, 100, 256), (3, 64, 288)), 5)
# Sums reach hundreds; these factors bring the gate into the range where every activation is curved.
GATE_ALPHA, UP_ALPHA = 2.0**-7, -(2.0**-6)
CONFIGS = (
    "t128x64x256_s0a3_swap",
    "t128x64x256_s2a3_p2",
    "t128x64x256_s0a3_2cta_p2",
    "t128x128x256_s0a2_2cta_p2",
    "t128x128x256_s0a2_p2",
    "t128x128x256_s2a2_2cta_swap_p4",
    "t128x192x256_s0a1_swap_p3",
    "t128x64x256_s2a3_2cta_swap_m2_p4",
)
SM120_CONFIGS = (
    "t128x8x256_s0a2_swap_p2",
    "t128x16x256_s0a2_swap_p3",
    "t128x32x128_s0a2_swap",
    "t128x64x128_s0a1_swap_p2",
    "t128x64x128_s0a1_p2",
    "t128x32x256_s2a2",
    "t128x64x128_s0a2_p2",
    "t128x128x128_s0a1_p2",
)
SM120_QUICK = SM120_CONFIGS[2:4]
EITHER_FAMILY = pytest.mark.parametrize(
    "arch", ["sm_100a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_120a", "sm_90a"))]
)
SM90_CONFIGS = (
    "t64x64x128_s2a1_swap_p3",
    "t64x128x128_s0a1_swap_p2",
    "t64x16x128_s0a1_swap_k4_p8",
    "t64x8x128_s0a1_swap",
)


def make_operands(case):
    """a, b1, b2, a_scale, b1_scale, b2_scale, alpha1, alpha2: sums are exact, the factors powers of two."""
    first, second = cases.make_operands(case), cases.make_operands(replace(case, seed=case.seed + 100))
    alphas = [torch.full((len(case.sizes),), alpha) for alpha in (GATE_ALPHA, UP_ALPHA)]
    return [first.a, first.b, second.b, first.a_scale, first.b_scale, second.b_scale, *alphas]


def run(case, operands, config=None, activation="silu", m_major=False, backend="emulator"):
    out = [
        poisoned(n, m, dtype=case.out_dtype).T if m_major else poisoned(m, n, dtype=case.out_dtype)
        for m, n, _ in case.sizes
    ]
    options = {"activation": activation, "out": out, "out_dtype": case.out_dtype, "backend": backend}
    returned = grouped_dual_gemm(*operands, **options, config=config)
    assert all(x is y for x, y in zip(returned, out, strict=True))
    return out


def assert_within_bound(case, operands, actual, activation="silu"):
    """Checks the bound that ``grouped_dual_gemm_reference`` derives, and similar ones for other activations, in units of 2^-24."""
    a, b1, b2, a_scale, b1_scale, b2_scale, alpha1, alpha2 = operands
    gates = grouped_gemm_reference(a, b1, a_scale, b1_scale, alpha1, torch.float64)
    ups = grouped_gemm_reference(a, b2, a_scale, b2_scale, alpha2, torch.float64)
    expected = grouped_dual_gemm_reference(*operands, torch.float64, activation=activation)
    out = torch.finfo(case.out_dtype)
    for got, want, x, y in zip(actual, expected, gates, ups, strict=True):
        # Gelu: the sigmoid's argument z has an error of 9 units, and an error of x is multiplied by 1 + 3 |z|.
        z = 1.5957691216057308 * (x + 0.044715 * x**3)
        # Gelu of erf: errors of x^2 / 2 reach exp(-x^2 / 2); a^2 is what counts for negative x.
        own = activation_of(activation)
        units = {
            "silu": 3 * x.abs() + 11,
            "gelu": 4 * x.clamp(max=0) ** 2 + 16,
            "gelu_tanh": 12 * z.abs() + 11,
            "relu": 4,
            "relu2": 5,
            "swiglu_oai": 7 * x.abs() + 12,
            "situ": 3 * x.abs() + 20,
        }[own.name]
        flushed = 2.0**-119 * y.abs()
        if own.name == "swiglu_oai":  # the error of y may exceed y + 1
            flushed += 2.0**-24 * (x * torch.sigmoid(own.alpha * x) * y).abs()
        bound = want.abs() * (units * 2.0**-24 + out.eps / 2) + out.tiny * out.eps + flushed
        error = (got.double() - want).abs()
        assert bool((error <= bound).all()), (
            f"{case.name}, {activation}: {(error / bound).max():.3g} times the bound"
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mode", "m_major"),
    [
        ("eager", False),
        pytest.param("random:1", False, marks=pytest.mark.slow),
        pytest.param("lazy", True, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("arch", "name"),
    [
        *(("sm_100a", name) for name in CONFIGS),
        pytest.param("sm_100a", "t128x64x256_s0a2_swap_k2_p4", marks=pytest.mark.slow),
        *(
            pytest.param("sm_120a", name, marks=[pytest.mark.slow] * (name not in SM120_QUICK))
            for name in SM120_CONFIGS
        ),
        ("sm_90a", SM90_CONFIGS[0]),
        *(pytest.param("sm_90a", name, marks=pytest.mark.slow) for name in SM90_CONFIGS[1:]),
    ],
)
def test_every_tile_shape_is_right_and_clean(arch, name, mode, m_major):
    """Within the bound, in one launch without hazards, in every mode of the emulator and both layouts."""
    if m_major and arch == "sm_90a":
        pytest.skip("sm_90a writes rows only")
    operands = make_operands(TILES)
    with observe(mode=mode, check=True) as observer:
        actual = run(
            TILES, operands, KernelConfig.from_name(name), m_major=m_major, backend=f"emulator:{arch}"
        )
    assert len(observer.stats) == 1
    assert_within_bound(TILES, operands, actual)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["lazy", "random:1"])
@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_same_bits_whenever_asynchronous_operations_happen(arch, mode):
    operands = make_operands(SMALL)
    expected = run(SMALL, operands, backend=f"emulator:{arch}")
    with observe(mode=mode, check=True):
        actual = run(SMALL, operands, backend=f"emulator:{arch}")
    for got, want in zip(actual, expected, strict=True):
        assert_bitwise_equal(got, want, mode=mode)


BOUNDED = "situ(beta=4.0,linear_beta=25.0)"
TEXTS = (*NAMES, BOUNDED, "swiglu_oai(alpha=1.5)")
FAST = (("sm_100a", BOUNDED), ("sm_120a", "relu"), ("sm_90a", "gelu"), ("sm_100a", "swiglu_oai"))


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    ("arch", "activation"),
    [
        pytest.param(*kind, marks=() if kind in FAST else pytest.mark.slow)
        for kind in product(("sm_100a", "sm_120a", "sm_90a"), TEXTS)
    ],
)
def test_activation(arch, activation, dtype):
    case = replace(SMALL, out_dtype=dtype)
    operands = make_operands(case)
    actual = run(case, operands, activation=activation, backend=f"emulator:{arch}")
    assert_within_bound(case, operands, actual, activation)


@EITHER_FAMILY
def test_extreme_gates(arch):
    """exp(-x) overflows and underflows: the result is 0, or the product itself."""
    case = cases.Case("extreme", ((40, 48, 256),), 3, out_dtype=torch.float32)
    operands = make_operands(case)
    operands[6] = torch.full((1,), 1.0)
    (gate,) = grouped_gemm_reference(operands[0], operands[1], operands[3], operands[4], None, torch.float64)
    assert gate.min() < -200 and gate.max() > 200
    (got,) = run(case, operands, backend=f"emulator:{arch}")
    assert not got[gate < -200].any() and torch.isfinite(got).all()
    (up,) = grouped_gemm_reference(
        operands[0], operands[2], operands[3], operands[5], operands[7], torch.float32
    )
    assert torch.equal(got[gate > 200], (gate.float() * up)[gate > 200])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch", [*sm100.ARCHS[1:], *sm120.ARCHS, *sm90.ARCHS])
def test_other_architectures(arch):
    operands = make_operands(SMALL)
    for got, want in zip(run(SMALL, operands, backend=f"emulator:{arch}"), run(SMALL, operands), strict=True):
        assert_bitwise_equal(got, want, arch=arch)


@EITHER_FAMILY
def test_either_alpha_may_be_missing(arch):
    operands, backend = make_operands(SMALL), f"emulator:{arch}"
    for missing in (6, 7):
        changed = [None if i == missing else x for i, x in enumerate(operands)]
        ones = [torch.ones(2) if i == missing else x for i, x in enumerate(operands)]
        for got, want in zip(
            run(SMALL, changed, backend=backend), run(SMALL, ones, backend=backend), strict=True
        ):
            assert_bitwise_equal(got, want)


@EITHER_FAMILY
def test_batches_scalars_and_rowmajor_scales(arch):
    """[M, K/2, L] operands: one launch for all batches; every layout of the scales gives the same bits."""
    backend = f"emulator:{arch}"
    m, n, k = 40, 72, 512
    batch = make_operands(cases.Case("batch", ((m, n, k), (m, n, k)), 9))
    a, b1, b2 = (torch.stack(tensors, 2).contiguous() for tensors in batch[:3])
    a, b1, b2 = (x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (a, b1, b2))
    blocked = [torch.stack(scales).unflatten(1, (-1, k // 64, 32, 4, 4)) for scales in batch[3:6]]
    plain = [
        torch.stack([from_blocked(s, rows, k // 16) for s in scales], 2)
        for scales, rows in zip(batch[3:6], (m, n, n), strict=True)
    ]
    alphas = (GATE_ALPHA, torch.tensor(UP_ALPHA))
    with observe() as observer:
        got = dual_gemm(a, b1, b2, *blocked, *alphas, backend=backend)
    assert len(observer.stats) == 1 and got.shape == (m, n, 2) and got.dtype == torch.bfloat16
    other = dual_gemm(a, b1, b2, *plain, *alphas, scale_layout="rowmajor", backend=backend)
    assert torch.equal(bits(got), bits(other))
    assert_within_bound(
        replace(SMALL, out_dtype=torch.bfloat16),
        batch,
        [got[:, :, 0].contiguous(), got[:, :, 1].contiguous()],
    )
    single = dual_gemm(*(x[:, :, 1] for x in (a, b1, b2)), *(s[1] for s in blocked), *alphas, backend=backend)
    assert single.shape == (m, n) and torch.equal(bits(single), bits(got[:, :, 1]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("activation", ["silu", BOUNDED, "gelu"])
@pytest.mark.parametrize("config", [KernelConfig.from_name(name) for name in CONFIGS], ids=CONFIGS)
def test_machine_code(config, activation):
    """No spills.

    Each of LOAD's two loops has one TMA for a, one for each b, and one for the scales of each. As many exponentials as reciprocals.
    """
    kernel = get_kernel(
        KernelKey("sm_100a", config, 2, torch.float16, True, activation=activation).validated()
    )
    assert kernel.resources.stack_bytes == 0
    assert len(re.findall(r"cp\.async\.bulk\.tensor", kernel.ptx)) == 2 * 6
    entry = kernel.ptx[kernel.ptx.index(".visible .entry") : kernel.ptx.index(".reqntid")]
    assert entry.count(".align 64 .b8") == 6 * 2
    assert kernel.ptx.count("ex2.approx") == kernel.ptx.count("rcp.approx") > 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("config", sm120.DUAL_CANDIDATES, ids=KernelConfig.to_name)
def test_machine_code_of_sm120(config):
    """No spills and no calls. One TMA for a, one for each b, and one for the scales of each."""
    kernel = get_kernel(KernelKey("sm_120a", config, 2, torch.float16, True, activation="silu").validated())
    assert kernel.resources.stack_bytes == 0
    assert len(re.findall(r"cp\.async\.bulk\.tensor", kernel.ptx)) == 6
    assert kernel.ptx.count("ex2.approx") == kernel.ptx.count("rcp.approx") > 0


# ---- refusals --------------------------------------------------------------------------------------------------


def test_operands_that_do_not_fit_are_refused():
    operands = make_operands(SMALL)
    for position, value, error, part in (
        (2, operands[2][::-1], ValueError, "group 0: a has K=256 and b2 has K=288|group 0: b2 is"),
        (2, operands[2][:1], ValueError, "b2 has 1 entries"),
        (5, operands[5][::-1], ValueError, "group 0: b2_scale"),
        (6, [1.0], ValueError, "alpha1 has 1 entries for 2 groups"),
        (7, torch.ones(2, dtype=torch.float64), TypeError, "alpha2 has dtype float64"),
    ):
        wrong = [value if i == position else x for i, x in enumerate(operands)]
        with pytest.raises(error, match=part):
            grouped_dual_gemm(*wrong)
    with pytest.raises(ValueError, match="activation='tanh' is unknown; use one of \"silu\""):
        grouped_dual_gemm(*operands, activation="tanh")
    with pytest.raises(ValueError, match=r"b1 has shape \[100, 128\]"):
        dual_gemm(operands[0][0].unsqueeze(2), operands[1][0], operands[2][0], *(s[0] for s in operands[3:6]))
    with pytest.raises(ValueError, match=r"out\[0\] overlaps b2_scale\[0\]"):
        buffer = torch.zeros(70 * 100 * 2, dtype=torch.uint8)
        shared = [[buffer[: s.numel()] if g == 0 else s for g, s in enumerate(operands[5])]]
        out = [buffer.view(torch.float16).view(70, 100), torch.empty(3, 64, dtype=torch.float16)]
        grouped_dual_gemm(*operands[:5], *shared, out=out, out_dtype=torch.float16)


def test_what_no_kernel_computes_is_refused():
    with pytest.raises(ConfigError, match="64 rows of weights each, of 2 operands; use M tile 64"):
        KernelKey("sm_90a", sm90.DEFAULT_CONFIG, 1, torch.float16, False, activation="silu").validated()
    with pytest.raises(ConfigError, match="sums of 2 x 128 columns.*N tile of 64"):
        wide = KernelConfig((128, 128, 128), num_acc_stage=2)
        KernelKey("sm_120a", wide, 1, torch.float16, False, activation="silu").validated()
    with pytest.raises(ConfigError, match="2 accumulators of 256 columns"):
        KernelKey(
            "sm_100a", KernelConfig((128, 256, 256)), 1, torch.float16, False, activation="silu"
        ).validated()
    count = base.max_list_groups(2) + 1
    with pytest.raises(UnsupportedProblem, match=f"{count} groups.*calls of at most {count - 1}"):
        make_plan(GroupedProblem(((1, 1, 32),) * count, activation="silu"), "sm_100a", 148)


def test_the_reference_is_the_formula():
    operands = make_operands(SMALL)
    operands[0] = [x.clone() for x in operands[0]]
    (gate, _), (up, _) = (
        grouped_gemm_reference(
            operands[0], operands[b], operands[3], operands[s], operands[alpha], torch.float64
        )
        for b, s, alpha in ((1, 4, 6), (2, 5, 7))
    )
    want = {
        "silu": gate / (1 + torch.exp(-gate)),
        "gelu": gate * (1 + torch.erf(gate / 2**0.5)) / 2,
        "situ": torch.tanh(gate) / (1 + torch.exp(-gate)),
        "relu": gate.relu(),
        "gelu_tanh": gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) / 2,
        "relu2": torch.where(gate > 0, gate * gate, 0.0),
        "swiglu_oai": gate / (1 + torch.exp(-1.702 * gate)),
    }
    for activation, value in want.items():
        got = on_parts.grouped_dual_gemm(*operands, activation=activation, out_dtype=torch.float32)[0]
        factor = up + 1 if activation == "swiglu_oai" else up
        torch.testing.assert_close(got.double(), value * factor, rtol=2**-23, atol=2**-40)
