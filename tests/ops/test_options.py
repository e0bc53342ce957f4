"""Public operations: block-scaled tensors in, the bits of the operations on parts out; at most ten arguments; typed."""

import inspect
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import flat_parts as on_parts
import pytest
import torch

import nvfp4_cute as nv
from nvfp4_cute.planning.config import KernelConfig

ROOT = Path(__file__).resolve().parents[2]
G, N, K = 2, 128, 128
OFFS = torch.tensor([40, 47], dtype=torch.int32)
MASKED = torch.tensor([40, 3], dtype=torch.int32)
# Records become arguments of the operations on parts, on every GPU alike.
EMULATORS = pytest.mark.parametrize(
    "backend", ["reference", "emulator", pytest.param("emulator:sm_90a", marks=pytest.mark.slow)]
)


def tensors(*shape, global_scale=0.37, **options):
    generator = torch.Generator().manual_seed(sum(shape))
    return nv.quantize(torch.randn(*shape, generator=generator), global_scale=global_scale, **options)


W = tensors(G, N, K, global_scale=[0.5, 0.25])
ROWS = torch.randn(47, K, generator=torch.Generator().manual_seed(1)).bfloat16()
FACTORS = torch.tensor([0.01, 0.02])


def same(got, want):
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@EMULATORS
def test_ragged_tensors_multiply_by_their_global_scales(backend):
    a = nv.grouped_quantize(ROWS, OFFS, global_scale=FACTORS)
    data, scale = a
    assert (a.shape, a.scale_layout) == ((47, K), "ragged")
    want = on_parts.grouped_gemm(
        data, W.data, scale, W.scale, OFFS, FACTORS * W.global_scale, backend=backend
    )
    same(nv.grouped_gemm(a, W, OFFS, backend=backend), want)
    same(
        nv.grouped_gemm(
            nv.BlockScaledTensor.from_parts(data, scale, FACTORS, scale_layout="ragged"), W, offs=OFFS
        ),
        want,
    )
    out = torch.zeros_like(want)
    assert nv.grouped_gemm(a, W, offs=OFFS, out=out, backend=backend) is out
    same(out, want)


@EMULATORS
def test_quantized_results_are_the_next_operands(backend):
    a, numbers = nv.grouped_quantize(ROWS, OFFS), [2.0, 4.0]
    factor = torch.tensor(numbers)
    hidden = nv.grouped_gemm(a, W, offs=OFFS, out_dtype="nvfp4", out_global_scale=numbers, backend=backend)
    data, scale = on_parts.grouped_gemm(
        a.data, W.data, a.scale, W.scale, OFFS, W.global_scale, out_dtype="nvfp4", out_global_scale=factor,
        backend=backend,
    )  # fmt: skip
    same(hidden.data, data)
    assert torch.equal(hidden.global_scale, factor)
    want = on_parts.grouped_gemm(data, W.data, scale, W.scale, OFFS, factor * W.global_scale)
    same(nv.grouped_gemm(hidden, W, offs=OFFS), want)
    batches = tensors(G, 40, K)
    masked = nv.grouped_gemm(batches, W, masked_m=MASKED, out_dtype="nvfp4", backend=backend)
    assert (masked.shape, masked.scale_layout) == ((G, 40, N), "blocked")
    again = nv.grouped_gemm(batches, W, masked_m=MASKED, out_dtype="nvfp4", out=masked, backend=backend)
    assert again is masked


@EMULATORS
def test_gate_and_up(backend):
    x, gate, up = tensors(40, K), tensors(N, K, global_scale=0.5), tensors(N, K, global_scale=0.25)
    alphas = [x.global_scale * w.global_scale for w in (gate, up)]
    flat = (x.data, gate.data, up.data, x.scale, gate.scale, up.scale)
    want = on_parts.dual_gemm(*flat, *alphas, activation="gelu_tanh", limit=2.0, backend=backend)
    got = nv.dual_gemm(x, nv.GateUp(gate, up), activation=nv.Activation("gelu_tanh", 2.0), backend=backend)
    same(got, want)
    scaled = nv.GateUp(gate, up, gate_alpha=2.0, up_alpha=0.5)
    same(
        nv.dual_gemm(x, scaled, activation="relu2", backend=backend),
        on_parts.dual_gemm(*flat, 2 * alphas[0], alphas[1] / 2, activation="relu2", backend=backend),
    )
    both = tensors(256, K)
    layout = "interleaved_32_gate_first"
    same(
        nv.dual_gemm(x, nv.GateUp(both, layout=layout), backend=backend),
        on_parts.dual_gemm(x, both, weight_layout=layout, backend=backend),
    )
    a = nv.grouped_quantize(ROWS, OFFS)
    same(
        nv.grouped_dual_gemm(a, nv.GateUp(W, W), offs=OFFS, backend=backend),
        on_parts.grouped_dual_gemm(
            a.data,
            W.data,
            W.data,
            a.scale,
            W.scale,
            W.scale,
            W.global_scale,
            W.global_scale,
            offs=OFFS,
            backend=backend,
        ),
    )
    (listed,) = nv.grouped_dual_gemm([x], nv.GateUp([gate], [up]), backend=backend)
    same(listed, nv.dual_gemm(x, nv.GateUp(gate, up), backend=backend))


def test_transposed_weights_are_named():
    with pytest.raises(ValueError, match=r"a has K=128 and b has K=256.*is b transposed\? It is \[N, K\]"):
        nv.gemm(tensors(40, K), tensors(K, 256))


def test_options():
    x, w = tensors(40, K), tensors(N, K)
    config = KernelConfig.from_name("t128x64x256_s2a2_swap_p3")
    options = nv.Options(config, prefetch_weights=True)
    same(nv.gemm(x, w, options=options, backend="emulator"), nv.gemm(x, w))
    with pytest.raises(TypeError, match="options=True is not Options"):
        nv.gemm(x, w, options=True)
    with pytest.raises(TypeError, match="pass True if the previous launch"):
        nv.Options(prefetch_weights=1)


@pytest.mark.slow
def test_tuning_finds_a_config():
    x, w = tensors(16, 256), tensors(128, 256)
    assert nv.tune(nv.gemm, x, w, backend="emulator:B200", keep=False).config.to_name()


def test_tuning_takes_no_config():
    x, w = tensors(16, 256), tensors(128, 256)
    with pytest.raises(ValueError, match="config is what tuning looks for"):
        nv.tune(nv.gemm, x, w, options=nv.Options(KernelConfig((128, 64, 256))))


X, V = tensors(40, K), tensors(N, K)
REFUSED = [
    (
        lambda: nv.gemm(X.data, V),
        "a is torch.uint8 .*, data without scales; pass BlockScaledTensor.from_parts",
    ),
    (lambda: nv.gemm(X, ROWS), r"b has torch.bfloat16 values; pass quantize\(b\)"),
    (lambda: nv.gemm(X, None), "b is None; pass a BlockScaledTensor"),
    (lambda: nv.gemv(ROWS, ROWS), r"a has torch.bfloat16 values"),
    (lambda: nv.grouped_gemm(3, "a"), "a is a int; pass a list with one tensor per group"),
    (lambda: nv.grouped_gemm(X, W), "a is an NVFP4Tensor; pass a list .* or offs= or masked_m="),
    (lambda: nv.grouped_gemm([X], [V.data]), r"b\[0\] is torch.uint8"),
    (lambda: nv.grouped_gemm([X], W, offs=OFFS), "a is a list; with offs or masked_m pass one tensor"),
    (lambda: nv.dual_gemm(X, V), r"w is a NVFP4Tensor; pass nvfp4_cute.GateUp\(gate, up\)"),
    (lambda: nv.dual_gemm(X, nv.GateUp(V, V), activation=3), "activation=3 is not an Activation"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_what_is_no_operand(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: nv.Activation("tanh"), "activation='tanh' is unknown; use one of \"silu\""),
        (
            lambda: nv.Activation("silu", alpha=1.5),
            "alpha=1.5 is a constant of 'swiglu_oai'; leave it out for 'silu'",
        ),
        (lambda: nv.Activation("situ", beta=0.0), "beta=0.0 is not a number from 0.0001 to 10000"),
        (lambda: nv.Activation("silu", limit=-1.0), "limit=-1.0 is not a positive number"),
        (
            lambda: nv.dual_gemm(X, nv.GateUp(V, V), activation="situ(gamma=2)"),
            r"activation='situ\(gamma=2\)'",
        ),
    ],
)
def test_constants_of_activations(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_parts_are_checked_at_the_door():
    made = nv.BlockScaledTensor.from_parts
    permuted = made(W.data, W.scale.permute(3, 4, 1, 5, 2, 0), W.global_scale, format="nvfp4")
    flat = made(W[0].data, W[0].scale.flatten(), 0.5)
    assert torch.equal(permuted.dequantize(), W.dequantize()) and torch.equal(
        flat.dequantize(), W[0].dequantize()
    )
    rows = V.with_scale_layout("rowmajor")
    same(nv.gemm(X, made(rows.data, rows.scale, rows.global_scale, scale_layout="rowmajor")), nv.gemm(X, V))
    with pytest.raises(ValueError, match='which is rowmajor; .* pass scale_layout="rowmajor"'):
        made(rows.data, rows.scale, rows.global_scale)
    int8 = nv.quantize(torch.randn(8, 64), format="int8")
    ones = made(int8.data, None, format="int8")
    assert torch.equal(nv.gemm(ones, ones, out_dtype=torch.int32), nv.gemm(int8, int8, out_dtype=torch.int32))
    one = nv.quantize(torch.randn(480, 128))  # one matrix, which [4, 120, 128] is not
    for scale in (one.scale, one.scale.flatten()):
        with pytest.raises(ValueError, match="scale has shape"):
            made(one.data.view(4, 120, 64), scale)
    for wrong in (0.0, -1.0, torch.nan, torch.inf, 1e-40, [1.0, -1.0], torch.tensor([0.5, 0.0])):
        with pytest.raises(ValueError, match="is not a positive, normal float32 number"):
            made(W.data, W.scale, wrong)
    with pytest.raises(TypeError, match="'auto' is not a number"):
        made(W.data, W.scale, "auto")
    for wrong in ({"format": "nvfp5"}, {"scale_layout": "columns"}, {"global_scale": [1.0, 2.0]}):
        with pytest.raises(ValueError, match="unknown|neither|global_scale has shape"):
            made(V.data, V.scale, **wrong)


def test_a_ragged_tensor_does_not_know_its_groups():
    a = nv.grouped_quantize(ROWS, OFFS)
    for use in (a.dequantize, lambda: a[0:40], lambda: a.with_scale_layout("rowmajor")):
        with pytest.raises(ValueError, match="only offs says where groups end"):
            use()
    with pytest.raises(TypeError, match="not iterable"):
        iter(V)
    with pytest.raises(ValueError, match=r"got \(2, 2, 32, 4, 4\)"):
        nv.gemm(a, V)


@pytest.mark.parametrize(
    "name", ["gemm", "gemv", "grouped_gemm", "dual_gemm", "grouped_dual_gemm", "quantize", "grouped_quantize"]
)
def test_an_operation_has_at_most_ten_arguments_and_help_begins_with_an_example(name):
    operation = getattr(nv, name)
    names = inspect.signature(operation).parameters
    assert len(names) <= 10
    assert not {"a_scale", "b_scale", "a_format", "b_format", "early_weights", "config"} & set(names)
    if name not in ("quantize",):
        doc = inspect.getdoc(operation)
        assert doc.index(">>>") < doc.index("Args:") and len(doc.splitlines()) <= 50


@pytest.mark.slow
def test_type_checkers_accept_examples_and_refuse_others(tmp_path):
    good = """
        import torch
        from nvfp4_cute import BlockScaledTensor, GateUp, Options, dual_gemm, gemm, grouped_gemm, grouped_quantize, quantize

        def f(x: torch.Tensor, w: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
            a, b = quantize(x), quantize(w, format="mxfp4")
            hidden: BlockScaledTensor = gemm(a, b, out_dtype="nvfp4")
            rows: list[torch.Tensor] = grouped_gemm([a], [b], options=Options(prefetch_weights=True))
            ragged: torch.Tensor = grouped_gemm(grouped_quantize(x, offs), b, offs=offs)
            return gemm(hidden, b) + rows[0] + ragged + dual_gemm(x, GateUp(b, b)) + gemm(x, b)
    """
    bad = (
        'grouped_gemm(3, "a")',
        "gemm(1.0, quantize(torch.ones(4, 32)))",
        "grouped_gemm(torch.ones(4), torch.ones(4))",
    )
    texts = [textwrap.dedent(good), *(f"import torch\nfrom nvfp4_cute import *\n{line}\n" for line in bad)]
    examples = sorted((ROOT / "nvfp4_cute" / "examples").glob("*.py"))
    # Decorators of CuTe DSL have no types.
    texts = [path.read_text() for path in examples if path.stem != "planted_race"] + texts
    for number, text in enumerate(texts):
        (tmp_path / f"t{number}.py").write_text(text)
        command = [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--follow-imports=silent",
            "--ignore-missing-imports",
        ]
        done = subprocess.run(
            [*command, f"t{number}.py"],
            cwd=tmp_path,
            env=os.environ | {"MYPYPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert (done.returncode == 0) == (number < len(texts) - len(bad)), done.stdout
