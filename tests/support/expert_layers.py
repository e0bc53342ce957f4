"""Layers of experts for tests: operands with exact sums, and a plain torch implementation that computes token by token."""

from dataclasses import dataclass, field
from typing import Any

import torch

import nvfp4_cute
from nvfp4_cute import ActivationFormat, Experts, Parallel
from nvfp4_cute.activation import activation_of
from nvfp4_cute.experts.activation import activate_rows
from nvfp4_cute.experts.weights import ExpertWeights
from nvfp4_cute.formats import block_scaled
from nvfp4_cute.formats.block_format import MXFP4
from nvfp4_cute.formats.codecs import encode, encode_e4m3
from nvfp4_cute.formats.scale_layout import padded_shape, to_blocked
from nvfp4_cute.reference import expand_operand


@dataclass
class Layer:
    """Arguments of ``moe``, positional ones and options."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    w13: ExpertWeights
    w2: ExpertWeights
    options: dict[str, Any] = field(default_factory=dict)

    def arguments(self):
        return self.x, self.ids, self.weights, self.w13, self.w2


def mx_weights(experts, n, k, generator, least_exponent=-6, format=MXFP4):
    """Random e2m1, or integers up to 7; scales are three powers of two from 2^least_exponent on, NaN in padding rows."""
    first = 127 + least_exponent
    data = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=generator)
    if format.element.bits == 8:
        numbers = torch.randint(-7, 8, (experts, n, k), generator=generator).float()
        data = encode(numbers, format.element)
    codes = torch.full((experts, *MXFP4.padded_scale_shape(n, k)), 0xFF, dtype=torch.uint8)
    codes[:, :n] = torch.randint(first, first + 3, (experts, n, codes.shape[2]), generator=generator).byte()
    scale = torch.stack([to_blocked(one) for one in codes]).view(torch.float8_e8m0fnu)
    return ExpertWeights(data, scale, None, format)


def some_weights(experts, n, k, generator):
    """Random e2m1 with scales 0, 1 and 2, NaN in padding rows, and a power of two per expert as the global scale."""
    data = torch.randint(0, 256, (experts, n, k // 2), dtype=torch.uint8, generator=generator)
    rows, blocks = padded_shape(n, k // 16)
    codes = torch.full((experts, rows, k // 16), 0x7F, dtype=torch.uint8)
    codes[:, :n] = encode_e4m3(torch.randint(0, 3, (experts, n, k // 16), generator=generator).float())
    scale = torch.stack([to_blocked(one) for one in codes]).view(torch.float8_e4m3fn)
    factors = torch.exp2(torch.randint(-7, -4, (experts,), generator=generator).float())
    return ExpertWeights(data, scale, factors)


def some_layer(
    tokens, top_k, experts, hidden, width, *, seed=0, dtype=torch.bfloat16, gated=True, used=None, foreign=False, **options
):  # fmt: skip
    """A layer whose gate and up values are clamped at 2, so that the scales of hidden values are close to each other.

    Args:
        used: experts from which ids are drawn; None means all.
        foreign: whether some ids belong to no local expert.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-6, 7, (tokens, hidden), generator=generator).float()
    x[:, ::16] = 6.0
    first = options.get("first_expert", 0)
    pool = torch.randperm(experts, generator=generator)[: used or experts] + first
    if foreign:
        pool = torch.cat([pool, torch.tensor([-1, first + experts, first - 1])])
    choice = torch.randint(0, len(pool), (tokens, top_k), generator=generator)
    weights = torch.rand(tokens, top_k, generator=generator)
    options = {"limit": 2.0, "activation": "relu2"} | options
    if not gated:
        options["weight_layout"] = "none"
    rows = 2 * width if gated else width
    return Layer(
        x.to(dtype),
        pool[choice].to(torch.int32),
        weights,
        some_weights(experts, rows, hidden, generator),
        some_weights(experts, hidden, width, generator),
        options,
    )


def moe(
    x, ids, weights, w13, w2, *, activations="nvfp4", activation="silu", limit=None, weight_layout="concatenated",
    input_scale=None, hidden_scale=None, alpha13=None, alpha2=None, bias13=None, bias2=None, shared=None, backend="auto", **ranks,
) -> torch.Tensor:  # fmt: skip
    """Calls ``nvfp4_cute.moe`` with the fields of its records as arguments; ``ranks`` are fields of ``Parallel``."""
    return nvfp4_cute.moe(
        x, ids, weights, Experts(w13, weight_layout, bias13, alpha13), Experts(w2, "none", bias2, alpha2),
        activation=activation_of(activation, limit), activations=ActivationFormat(activations, input_scale, hidden_scale),
        shared=shared, parallel=Parallel(**ranks) if ranks else None, backend=backend,
    )  # fmt: skip


def factor_of(factors, expert):
    """A global scale of one expert."""
    if factors is None:
        return None
    return factors.reshape(-1)[expert if factors.numel() > 1 else 0]


def naive(layer: Layer) -> torch.Tensor:
    """Computes the layer token by token and expert by expert, with products in float64."""
    options, x = layer.options, layer.x
    first, layout = options.get("first_expert", 0), options.get("weight_layout", "concatenated")
    experts = layer.w13.shape[0]
    product = weight_only_product if options.get("activations") == "16bit" else quantized_product
    fused = layout == "concatenated" and layer.w13.shape[1] % 256 == 0
    expand = lambda w, e: expand_operand(
        w.data[e], w.scale[e].reshape(-1).view(torch.uint8), "blocked", w.format
    ).double()
    used = {e for e in (layer.ids.long() - first).unique().tolist() if 0 <= e < experts}
    decoded = {e: (expand(layer.w13, e), expand(layer.w2, e)) for e in used}
    total = torch.zeros(x.shape, dtype=torch.float32)
    for t in range(len(x)):
        for k in range(layer.ids.shape[1]):
            e = int(layer.ids[t, k]) - first
            if not 0 <= e < experts:
                continue
            h = product(
                x[t : t + 1], decoded[e][0], options.get("input_scale"), layer.w13.global_scale, e, x.dtype
            )
            if not fused:
                h = h.to(x.dtype).float()
            if options.get("bias13") is not None:
                h = h + options["bias13"][e].float()
            gate_layout = layout if layout != "none" else "none"
            h = activate_rows(h, options["activation"], gate_layout, options["limit"])
            row = product(h, decoded[e][1], options.get("hidden_scale"), layer.w2.global_scale, e, x.dtype)
            row = row.to(x.dtype).float()
            if options.get("bias2") is not None:
                row = row + options["bias2"][e].float()
            total[t] = total[t] + layer.weights[t, k] * row[0]
    if options.get("shared") is not None:
        total = total + options["shared"].float()
    return total.to(x.dtype)


def quantized_product(rows, weights, scale, weight_scale, expert, dtype):
    """Product of quantized rows and an expert's weights in float32: summed exactly, rounded, multiplied by the factors."""
    factor = factor_of(scale, expert)
    q = block_scaled.quantize(rows, global_scale=factor)
    values = block_scaled.dequantize(block_scaled.NVFP4Tensor(q.data, q.scale, None, q.shape), torch.float32)
    alpha = factor_of(weight_scale, expert)
    alpha = alpha if factor is None else alpha * factor
    return (values.double() @ weights.T).float() * alpha


def weight_only_product(rows, weights, scale, weight_scale, expert, dtype):
    """Like ``quantized_product``, for rows of ``dtype``, which have no scales."""
    assert scale is None
    products = (rows.to(dtype).double() @ weights.T).float()
    return products if weight_scale is None else products * factor_of(weight_scale, expert)
