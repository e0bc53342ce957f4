"""Checkpoints with int4 weights, packed here like their tools do, against (code - zero point) * scale written out here."""

import pytest
import torch
from checkpoint_files import nvfp4, write
from int4_files import awq_words, compressed_tensors, packed, words

from nvfp4_cute import int4_format, quantize
from nvfp4_cute.cli import main
from nvfp4_cute.errors import CheckpointError
from nvfp4_cute.models.checkpoints import Checkpoint
from nvfp4_cute.models.layers import experts_module, linear_module
from nvfp4_cute.models.quantizing.checkpoint import quantize_checkpoint
from nvfp4_cute.models.quantizing.gptq import gptq
from nvfp4_cute.models.quantizing.weights import Rounding, quantized
from nvfp4_cute.nn.rounded import rounded

N, K, PREFIX = 48, 256, "model.layers.0.mlp.up_proj"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": False, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def parts(blocks=4, dtype=torch.float16, seed=0, n=N, k=K):
    """Draws codes [N, K], scales [N, blocks], zero points 0 to 15 [N, blocks]."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (n, k), generator=generator)
    scale = (torch.rand(n, blocks, generator=generator) + 0.1).to(dtype)
    return codes, scale, torch.randint(0, 16, (n, blocks), generator=generator)


def values(codes, scale, zero_points):
    step = codes.shape[1] // scale.shape[1]
    return (codes - zero_points.repeat_interleave(step, 1)) * scale.double().repeat_interleave(step, 1)


def read(folder, tensors, quantization):
    write(folder, {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, quantization)
    checkpoint = Checkpoint(folder)
    assert list(checkpoint.linears) == [PREFIX] and not checkpoint.plain
    stored = checkpoint.linear(PREFIX)
    assert str(stored.scheme) == "W int4, A 16 bit" and stored.weight.shape == (N, K)
    return stored.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("zero_points", ["none", "packed", "int8"])
def test_compressed_tensors(tmp_path, dtype, zero_points):
    codes, scale, zero = parts(dtype=dtype)
    tensors = {"weight_packed": words(codes, 1), "weight_scale": scale, "weight_shape": torch.tensor([N, K])}
    if zero_points == "none":
        zero = torch.full_like(zero, 8)
    else:
        tensors["weight_zero_point"] = (
            words(zero, 0) if zero_points == "packed" else (zero - 8).to(torch.int8)
        )
    weight = read(tmp_path, tensors, compressed_tensors(symmetric=zero_points == "none"))
    assert weight.format == int4_format(64, dtype, zero_points=zero_points != "none")
    assert torch.equal(weight.dequantize(torch.float64), values(codes, scale, zero))


def test_one_scale_a_row(tmp_path):
    codes, scale, zero = parts(blocks=1)
    tensors = {"weight_packed": words(codes, 1), "weight_scale": scale}
    weight = read(tmp_path, tensors, compressed_tensors(strategy="channel", group_size=None))
    assert weight.format == int4_format(128, "float16")
    assert torch.equal(weight.dequantize(torch.float64), values(codes, scale, torch.full_like(zero, 8)))


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
@pytest.mark.parametrize(("layout", "less"), [("gptq", 1), ("gptq_v2", 0)])
def test_gptq(tmp_path, layout, less, key):
    codes, scale, zero = parts()
    tensors = {
        "qweight": words(codes.T, 0),
        "qzeros": words((zero.T - less) & 15, 1),
        "scales": scale.T.contiguous(),
        "g_idx": (torch.arange(K) // 64).int(),
        "bias": torch.zeros(N),
    }
    write(tmp_path, {f"{PREFIX}.{k}": v for k, v in tensors.items()}, GPTQ | {key: layout})
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.plain == [f"{PREFIX}.bias"]
    weight = checkpoint.linear(PREFIX).weight
    assert weight.format == int4_format(64, "float16", zero_points=True)
    assert torch.equal(weight.dequantize(torch.float64), values(codes, scale, zero))


def test_symmetric_gptq_has_no_zero_points(tmp_path):
    codes, scale, zero = parts()
    eight = torch.full_like(zero, 8)
    tensors = {"qweight": words(codes.T, 0), "qzeros": words(eight.T - 1, 1), "scales": scale.T.contiguous()}
    weight = read(tmp_path, tensors, GPTQ | {"sym": True})
    assert weight.format == int4_format(64, "float16")
    assert torch.equal(weight.dequantize(torch.float64), values(codes, scale, eight))


def test_awq(tmp_path):
    codes, scale, zero = parts()
    tensors = {"qweight": awq_words(codes.T), "qzeros": awq_words(zero.T), "scales": scale.T.contiguous()}
    weight = read(tmp_path, tensors, AWQ)
    assert weight.format == int4_format(64, "float16", zero_points=True)
    assert torch.equal(weight.dequantize(torch.float64), values(codes, scale, zero))


def product(stored, x):
    """Computes the result of a layer's module, without bias."""
    module = linear_module(stored, None, dtype=torch.float16, device="cpu")
    return module(x.half()).double()


@pytest.mark.parametrize("tool", ["gptq", "compressed-tensors"])
def test_ordered_by_activations(tmp_path, tool):
    """desc_act and actorder: each value of K names its block, and the layer reads its rows in the order of blocks."""
    codes, scale, zero = parts()
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1)).int() // 64
    if tool == "gptq":
        tensors = {"qweight": words(codes.T, 0), "qzeros": words(zero.T - 1 & 15, 1), "scales": scale.T.contiguous(),
                   "g_idx": order}  # fmt: skip
        config = GPTQ | {"desc_act": True}
    else:
        tensors = {"weight_packed": words(codes, 1), "weight_scale": scale, "weight_zero_point": words(zero, 0),
                   "weight_g_idx": order}  # fmt: skip
        config = compressed_tensors(symmetric=False, actorder="group")
    write(tmp_path, {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, config)
    stored = Checkpoint(tmp_path).linear(PREFIX)
    wanted = (codes - zero[:, order]) * scale.double()[:, order]
    assert torch.equal(stored.dequantize(torch.float64), wanted)
    x = torch.randint(-8, 9, (5, K)).double()
    assert (product(stored, x) - x @ wanted.T).norm() < 2**-9 * (x @ wanted.T).norm()


@pytest.mark.parametrize(("kind", "activations"), [("int", "int8"), ("float", "fp8")])
def test_w4a8(tmp_path, kind, activations):
    """compressed-tensors' W4A8 and W4AFP8: one integer per byte, 8-bit activations with one scale per token."""
    codes, scale, zero = parts(blocks=2)
    config = compressed_tensors(group_size=128)
    config["format"] = config["config_groups"]["group_0"]["format"] = "int-quantized"
    given = {"num_bits": 8, "type": kind, "strategy": "token", "dynamic": True, "symmetric": True}
    config["config_groups"]["group_0"]["input_activations"] = given
    tensors = {"weight": (codes - 8).to(torch.int8), "weight_scale": scale}
    write(tmp_path, {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, config)
    stored = Checkpoint(tmp_path).linear(PREFIX)
    assert (stored.scheme.weights, stored.scheme.activations) == ("int4", activations)
    wanted = values(codes, scale, torch.full_like(zero, 8))
    assert torch.equal(stored.dequantize(torch.float64), wanted)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(0)).half()
    expected = rounded(x, activations).double() @ wanted.T
    assert (product(stored, x) - expected).norm() < 2**-9 * expected.norm()


def test_unused_order(tmp_path):
    """compressed-tensors writes -1 everywhere if K was never ordered."""
    codes, scale, zero = parts()
    tensors = {
        "weight_packed": words(codes, 1),
        "weight_scale": scale,
        "weight_g_idx": torch.full((K,), -1).int(),
    }
    weight = read(tmp_path, tensors, compressed_tensors())
    assert torch.equal(weight.dequantize(torch.float64), values(codes, scale, torch.full_like(zero, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modelopt_awq(tmp_path, dtype):
    """W4A16_AWQ: bytes of two rows, -8 to 7; layers with a pre_quant_scale multiply activations by it first."""
    codes, scale, zero = parts(blocks=2, dtype=torch.bfloat16)
    scale = scale.to(dtype)
    pre = 2.0 ** torch.randint(-2, 3, (K,), generator=torch.Generator().manual_seed(2))
    signed = (codes - 8) & 15
    packed = (signed[0::2] | signed[1::2] << 4).to(torch.uint8)
    other = "model.layers.0.mlp.gate_proj"
    tensors = {
        f"{name}.{k}": v for name in (PREFIX, other) for k, v in (("weight", packed), ("weight_scale", scale))
    }
    tensors[f"{PREFIX}.pre_quant_scale"] = pre.bfloat16()
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "ignore": ["lm_head"]}
    write(tmp_path, tensors, quantization)
    checkpoint = Checkpoint(tmp_path)
    plain = values(codes, scale, torch.full_like(zero, 8))
    stored = checkpoint.linear(PREFIX)
    assert stored.weight.format == int4_format(128, dtype) and not checkpoint.plain
    assert torch.equal(stored.dequantize(torch.float64), plain * pre)
    assert checkpoint.linear(other).pre_scale is None
    assert torch.equal(checkpoint.linear(other).dequantize(torch.float64), plain)
    x = torch.randint(-8, 9, (5, K)).double()
    wanted = x @ (plain * pre).T
    assert (product(stored, x) - wanted).norm() < 2**-9 * wanted.norm()


@pytest.mark.parametrize(
    ("pre", "message"),
    [
        (torch.ones(K - 1), r"pre_quant_scale is torch.float32 \[255\]; its layer has 256 activations"),
        (torch.zeros(K), "pre_quant_scale has factors that are zero or not finite"),
        (torch.full((K,), torch.nan), "pre_quant_scale has factors that are zero or not finite"),
    ],
)
def test_factors_of_activations_that_are_refused(tmp_path, pre, message):
    codes, scale, _ = parts(blocks=2)
    tensors = {
        "weight": (codes[::2] | codes[1::2] << 4).to(torch.uint8),
        "weight_scale": scale,
        "pre_quant_scale": pre,
    }
    quantization = {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}
    write(tmp_path, {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, quantization)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path).linear(PREFIX)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPTQ | {"bits": 8}, "bits is 8; this reader takes 4"),
        (
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format is 'marlin'; this reader takes gptq, gptq_v2",
        ),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "dynamic has settings by module"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'; this reader takes 'gemm'"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "version is 'gemv'; this reader takes 'gemm'"),
        (AWQ | {"bits": 8}, "bits is 8; this reader takes 4"),
        (compressed_tensors(num_bits=8), "num_bits is 8, and its format int4 has 4"),
    ],
    ids=str,
)
def test_configs_that_are_refused(tmp_path, config, message):
    write(tmp_path, {"x.weight": torch.zeros(2)}, config)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_quantized_activations_are_refused(tmp_path):
    config = compressed_tensors()
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int"}
    write(tmp_path, {"x.weight": torch.zeros(2)}, config)
    with pytest.raises(CheckpointError, match="group_0 quantizes activations of int4 weights"):
        Checkpoint(tmp_path)


def test_tensors_that_are_refused(tmp_path):
    codes, scale, zero = parts()
    gptq = {"qweight": words(codes.T, 0), "qzeros": words(zero.T, 1), "scales": scale.T.contiguous()}
    awq = {"qweight": awq_words(codes.T), "qzeros": awq_words(zero.T), "scales": scale.T.contiguous()}
    packed = {"weight_packed": words(codes, 1), "weight_scale": scale}
    nan = scale.clone()
    nan[3, 1] = torch.nan
    uneven = (torch.arange(K) // 64).int()
    uneven[0] = 1
    for number, (tensors, config, message) in enumerate(
        (
            (
                gptq | {"g_idx": uneven},
                GPTQ,
                "ordered by activations in 4 blocks that do not .*desc_act=False",
            ),
            (packed | {"weight_g_idx": uneven}, compressed_tensors(), "ordered by activations"),
            (packed | {"weight_g_idx": uneven[:-1]}, compressed_tensors(), "ordered by activations"),
            (gptq, GPTQ | {"sym": True}, "has zero points 0 to 15, and the config says sym"),
            (gptq | {"scales": scale.T[:3].contiguous()}, GPTQ, r"48 x 256 values and scales \[48, 3\]"),
            (awq | {"qweight": awq["qweight"].float()}, AWQ, "packed integers of torch.float32"),
            (awq | {"qzeros": awq["qzeros"][:2]}, AWQ, r"zero points \[48, 2\], and scales \[48, 4\]"),
            (
                packed | {"weight_shape": torch.tensor([N, K - 3])},
                compressed_tensors(),
                "K is not a multiple of 8",
            ),
            (packed | {"weight_scale": nan}, compressed_tensors(), "scales that are NaN or infinite"),
            (packed, compressed_tensors(symmetric=False), "has no weight_zero_point"),
            ({"qweight": gptq["qweight"], "scales": gptq["scales"]}, GPTQ, "gptq and has no qzeros"),
            (gptq, GPTQ | {"desc_act": True}, "gptq and has no g_idx"),
            (packed, compressed_tensors(actorder="group"), "has no weight_g_idx"),
            (packed, compressed_tensors(actorder="dynamic"), "has no weight_g_idx"),
            ({"qweight": awq["qweight"], "scales": awq["scales"]}, AWQ, "awq and has no qzeros"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}, config)
        with pytest.raises(CheckpointError, match=message):
            Checkpoint(folder).linear(PREFIX)


def test_experts_are_stacked(tmp_path):
    """Kimi-K2's form: one layer per projection of an expert, bfloat16 scales per 32 values."""
    tensors, wanted = {}, {}
    for e in range(2):
        for i, (name, n, k) in enumerate((("gate_proj", 64, K), ("up_proj", 64, K), ("down_proj", K, 64))):
            codes, scale, zero = parts(k // 32, torch.bfloat16, 10 * e + i, n, k)
            key = f"model.layers.1.mlp.experts.{e}.{name}"
            tensors |= {f"{key}.weight_packed": words(codes, 1), f"{key}.weight_scale": scale}
            wanted[e, name] = values(codes, scale, torch.full_like(zero, 8))
    write(tmp_path, tensors, compressed_tensors(group_size=32))
    stored = Checkpoint(tmp_path).read_experts("model.layers.1.mlp.experts")
    assert stored.w13.format == int4_format(32) and stored.w13.shape == (2, 128, K)
    first, second = (w.dequantize(torch.float64) for w in (stored.w13, stored.w2))
    for e in range(2):
        assert torch.equal(first[e], torch.cat([wanted[e, "gate_proj"], wanted[e, "up_proj"]]))
        assert torch.equal(second[e], wanted[e, "down_proj"])


def experts_of(folder, orders, change=lambda name, tensors: tensors):
    """Writes GPTQ experts [2, 64, 128] with separate orders; returns the values of each projection for unordered rows."""
    tensors, wanted = {}, {}
    for e in range(2):
        for i, (name, n, k) in enumerate(
            (("gate_proj", 64, 128), ("up_proj", 64, 128), ("down_proj", 128, 64))
        ):
            codes, scale, zero = parts(k // 32, torch.float16, 10 * e + i, n, k)
            # gate and up read the same rows, in one order
            generator = torch.Generator().manual_seed(10 * e + (name == "down_proj"))
            order = torch.randperm(k, generator=generator) // 32 if orders else torch.arange(k) // 32
            key = f"model.layers.1.mlp.experts.{e}.{name}"
            one = packed("gptq", codes, scale, zero, order)
            tensors |= {f"{key}.{part}": tensor for part, tensor in change(f"{e}.{name}", one).items()}
            wanted[e, name] = (codes - zero[:, order]) * scale.double()[:, order]
    write(folder, tensors, GPTQ | {"group_size": 32, "desc_act": orders})
    return wanted


def test_experts_follow_orders_of_their_own(tmp_path):
    """desc_act: rows of an expert are gathered in its order before both products."""
    wanted = experts_of(tmp_path, orders=True)
    stored = Checkpoint(tmp_path).read_experts("model.layers.1.mlp.experts")
    layer = experts_module(stored, "silu", dtype=torch.float16, device="cpu")
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(6, 128, generator=generator) / 16).half()
    ids, weights = (
        torch.tensor([[0], [1], [0], [1], [1], [2]]),
        torch.ones(6, 1),
    )  # the last belongs to no expert
    y = layer(x, ids, weights)
    for row, (e,) in enumerate(ids.tolist()):
        if e == 2:
            assert not y[row].any()
            continue
        gate, up = (wanted[e, name] @ x[row].double() for name in ("gate_proj", "up_proj"))
        expected = wanted[e, "down_proj"] @ (torch.nn.functional.silu(gate) * up)
        assert (y[row].double() - expected).norm() < 2**-8 * expected.norm()


def test_gate_and_up_of_different_orders_are_refused(tmp_path):
    def turned(name, tensors):
        return tensors | {"g_idx": tensors["g_idx"].flip(0)} if name == "1.up_proj" else tensors

    experts_of(tmp_path, orders=True, change=turned)
    with pytest.raises(
        CheckpointError, match="gate and up projections of experts have different orders of K"
    ):
        Checkpoint(tmp_path).read_experts("model.layers.1.mlp.experts")


@pytest.mark.parametrize("scheme", ["W4A16_NVFP4", "NVFP4_AWQ", "W4A16_AWQ"])
def test_factors_of_experts_activations(tmp_path, scheme):
    """A power of two in pre_quant_scale, with weights whose scales were divided by it, changes no bit of the result."""
    generator, outputs = torch.Generator().manual_seed(0), []
    factors = 2.0 ** torch.randint(-2, 3, (2, 128 // 16), generator=generator)
    for has_factors in (False, True):
        tensors = {}
        for e in range(2):
            for i, (name, n, k) in enumerate(
                (("gate_proj", 64, 128), ("up_proj", 64, 128), ("down_proj", 128, 64))
            ):
                key, factor = f"model.layers.1.mlp.experts.{e}.{name}", factors[e, : k // 16]
                if scheme == "W4A16_AWQ":
                    codes, scale, _ = parts(k // 32, torch.bfloat16, 10 * e + i, n, k)
                    factor = factor[::2]
                    one = {"weight": (codes[::2] | codes[1::2] << 4).to(torch.uint8)}
                    one["weight_scale"] = scale / factor if has_factors else scale
                else:
                    one = {part.rpartition(".")[2]: t for part, t in nvfp4("x", n, k, 10 * e + i).items()}
                    scale = one["weight_scale"].float()
                    one["weight_scale"] = (scale / factor if has_factors else scale).to(torch.float8_e4m3fn)
                if has_factors:
                    one["pre_quant_scale"] = factor.repeat_interleave(k // len(factor)).bfloat16()
                tensors |= {f"{key}.{part}": tensor for part, tensor in one.items()}
        folder = tmp_path / str(has_factors)
        quantization = {"quant_method": "modelopt", "quant_algo": scheme}
        stored = Checkpoint(write(folder, tensors, quantization)).read_experts("model.layers.1.mlp.experts")
        assert (stored.w2_pre_scale is not None) == has_factors
        x = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
        if scheme == "NVFP4_AWQ":
            # Scaled rows are rounded to 4 bits; this factor scales whole NVFP4 blocks without overflow of a scale.
            x = x / 8
        ids = torch.tensor([[0], [1], [0], [1], [1]])
        module = experts_module(stored, "silu", dtype=torch.bfloat16, device="cpu")
        outputs.append(module(x, ids, torch.ones(5, 1)).float())
    assert (outputs[0] - outputs[1]).norm() <= 2**-6 * outputs[0].norm()


def test_a_model_is_quantized(tmp_path, capsys):
    """The command line writes compressed-tensors' layout; the weights equal those of ``quantize``."""
    generator = torch.Generator().manual_seed(0)
    names = [f"model.layers.0.self_attn.{p}_proj" for p in "qkvo"]
    tensors = {f"{name}.weight": torch.randn(64, 256, generator=generator).bfloat16() for name in names}
    tensors["model.norm.weight"] = torch.ones(256).bfloat16()
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder, tensors, None, model_type="qwen3")
    assert main(["quantize", str(folder), "--out", str(tmp_path / "out"), "--format", "int4"]) == 0
    assert "4 layers in int4" in capsys.readouterr().out
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.tool == "compressed-tensors" and checkpoint.plain == ["model.norm.weight"]
    for name in names:
        weight = checkpoint.linear(name).weight
        want = quantize(tensors[f"{name}.weight"], format=int4_format(128), scale_layout="rowmajor")
        assert torch.equal(weight.data, want.data) and torch.equal(weight.scale, want.scale)
    with pytest.raises(ValueError, match='which has no word for it; pass layout="compressed-tensors"'):
        quantize_checkpoint(folder, tmp_path / "other", format="int4", layout="modelopt")


def test_searched_scales_and_gptq_err_less():
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(n, 256, generator=generator) for n in (32, 1024))
    x[:, 1:] += x[:, :-1]
    name = int4_format(128).name
    found = [quantized(weight, name), quantized(weight, name, search=True)]
    found.append(gptq(weight, Rounding.of(weight, name, None, True), x.T @ x))
    of_weights = [(w.dequantize() - weight).norm() for w in found]
    of_results = [(x @ (w.dequantize() - weight).T).norm() for w in found]
    assert of_weights[1] < 0.98 * of_weights[0] and of_results[2] < 0.8 * of_results[1]
