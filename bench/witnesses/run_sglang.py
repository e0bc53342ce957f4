"""SGLang: products, norms, routers and linear attention, without the imports of the server."""

import importlib
import importlib.util
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from nvfp4_cute.bench import public_bug_runs
from nvfp4_cute.bench.witnesses.support import close, int32, main, rand

DIM = 128
spec = importlib.util.find_spec("sglang")
assert spec is not None and spec.submodule_search_locations
OPS = public_bug_runs.sglang(Path(spec.submodule_search_locations[0]).parent)
public_bug_runs.stand_in(
    "sglang.srt.utils",
    get_device_sm=lambda: 100,
    is_sm100_supported=lambda: True,
    get_device_core_count=lambda device: 16,
)
public_bug_runs.package("sglang.kernels.jit", OPS.parent / "jit")
public_bug_runs.stand_in("sglang.kernels.jit.utils", is_arch_support_pdl=lambda: False)
public_bug_runs.stand_in("sglang.kernels.kda_kernels", __path__=[])
public_bug_runs.stand_in(
    "sglang.kernels.kda_kernels.norm_scale_shift_jit",
    try_fused_norm_scale_shift=lambda *given: None,
    try_fused_scale_residual_norm_scale_shift=lambda *given: None,
)


def module(name: str) -> Any:
    """Imports a module of SGLang's operations, with empty packages around it."""
    parts = name.split(".")
    for depth in range(1, len(parts)):
        package = ".".join(parts[:depth])
        public_bug_runs.package(f"sglang.kernels.ops.{package}", OPS / package.replace(".", "/"))
    return importlib.import_module(f"sglang.kernels.ops.{name}")


def product(rows: int) -> None:
    """Multiplies bfloat16."""
    x, w = rand(rows, 512), rand(256, 512)
    close(
        module("gemm.cutedsl_bf16_gemm")._tgv_bf16_gemm_run(x, w, None),
        x.cpu().double() @ w.cpu().double().T,
        0.005,
    )


def fused_a() -> None:
    """Multiplies four tokens with split-K."""
    x, w = rand(4, 1024), rand(32, 1024)
    found = module("gemm.cutedsl_dsv3_fused_a_gemm")._dsv3_fused_a_gemm_run(x, w.t())
    close(found, x.cpu().double() @ w.cpu().double().T, 0.005)


def dual() -> None:
    """Multiplies by gate and up weights and applies SwiGLU."""
    x, w = rand(16, 256), rand(512, 256, scale=0.1)
    gate, up = (x.cpu().double() @ w.cpu().double().T).chunk(2, -1)
    close(module("gemm.cutedsl_dual_gemm")._dual_gemm_swiglu_run(x, w, -1), F.silu(gate) * up, 0.01)


def router() -> None:
    """Multiplies float32 by the weights of 64 experts."""
    x, w = rand(4, 2048, dtype=torch.float32), rand(64, 2048, dtype=torch.float32)
    close(
        module("gemm.muse_spark_router_gemv_cutedsl").router_gemv_cute(x, w),
        x.cpu().double() @ w.cpu().double().T,
        1e-4,
    )


def norm(kind: str) -> None:
    """Compares a norm with scale and shift."""
    x, weight, bias, scale, shift = rand(1, 16, 512), *(rand(512) for _ in range(4))
    run = module("diffusion.norm.scale_residual_norm_cutedsl").fused_norm_scale_shift
    a, w, b, factor, term = (part.cpu().double() for part in (x, weight, bias, scale, shift))
    if kind == "rms":
        found, normal = run(x, weight, None, scale, shift, kind), F.rms_norm(a, (512,), w, 1e-5)
    else:
        found, normal = run(x, weight, bias, scale, shift, kind), F.layer_norm(a, (512,), w, b, 1e-5)
    close(found, normal * (1 + factor) + term, 0.01)


def decode(family: str, count: int) -> None:
    """Compares a decoding step of the gated delta rule for `count` sequences of one head."""
    q, k, v = (rand(count, 1, 1, DIM) for _ in range(3))
    a = rand(count, 1, 1, DIM) if family == "kda" else rand(count, 1, 1)
    b, log, bias = rand(count, 1, 1), rand(1, dtype=torch.float32), rand(*a.shape[2:])
    state = rand(count, 1, DIM, DIM, scale=0.1, dtype=torch.float32)
    before, name = state.cpu().double(), "kda" if family == "kda" else "delta_rule"
    run = getattr(module(f"attention.cutedsl_{family}"), f"cutedsl_fused_sigmoid_gating_{name}_update")
    found = run(log, bias, q, k, v, a, b, state, int32(list(range(count))))
    x, y, z = (part.cpu().double().view(count, DIM) for part in (q, k, v))
    x, y = F.normalize(x, dim=-1) * DIM**-0.5, F.normalize(y, dim=-1)
    gate = (
        -log.cpu().double().exp()
        * F.softplus(a.cpu().double().view(count, -1) + bias.cpu().double().view(1, -1))
    ).exp()
    kept = before[:, 0] * gate[:, None, :]
    error = (z - (kept @ y[..., None])[..., 0]) * b.cpu().double().view(count, 1).sigmoid()
    after = kept + error[..., None] * y[:, None, :]
    close(found.view(count, DIM), (after @ x[..., None])[..., 0], 0.02)


def prefill(name: str) -> None:
    """Runs a prefill kernel of linear attention. Its results are not compared."""
    getattr(public_bug_runs, name)(OPS.parents[2], ())


main(
    {
        **{name.replace("_", "-"): partial(prefill, name) for name in ("gdn_kkt", "gdn_output", "kda_kkt")},
        "bf16-gemm": partial(product, 16),
        "bf16-gemm-128": partial(product, 128),
        "fused-a-gemm": fused_a,
        "dual-gemm": dual,
        "router": router,
        "rms-norm-scale-shift": partial(norm, "rms"),
        "layer-norm-scale-shift": partial(norm, "layer"),
        "kda-decode": partial(decode, "kda", 2),
        "gdn-decode": partial(decode, "gdn", 2),
        "gdn-decode-32": partial(decode, "gdn", 32),
    }
)
