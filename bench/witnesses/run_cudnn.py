"""cuDNN frontend: products with epilogues, norms, convolution, RoPE and attention in CuTe DSL."""

import importlib.util
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from nvfp4_cute.bench import public_bug_runs
from nvfp4_cute.bench.witnesses.support import close, int32, main, rand


def columns(x: torch.Tensor) -> torch.Tensor:
    """Returns a matrix as ``[rows, columns, 1]``."""
    return x.unsqueeze(-1)


def scales(rows: int, depth: int) -> torch.Tensor:
    """Returns MXFP8 scales of 1, in blocks of 128 rows."""
    ones = torch.full((1, -(-rows // 128), -(-depth // 128), 32, 4, 4), 127, dtype=torch.uint8, device="cuda")
    return ones.view(torch.float8_e8m0fnu).permute(3, 4, 1, 5, 2, 0)


def amax() -> None:
    """Multiplies MXFP8 and takes the largest magnitude."""
    from cudnn.gemm.cutedsl.dense.amax.api import gemm_amax_wrapper_sm100

    a, b = (rand(rows, 256).to(torch.float8_e4m3fn) for rows in (256, 128))
    found = gemm_amax_wrapper_sm100(columns(a), columns(b), scales(256, 256), scales(128, 256))
    expected = a.cpu().double() @ b.cpu().double().T
    close(found["c_tensor"][..., 0], expected, 1e-4)
    close(found["amax_tensor"].flatten(), expected.abs().max().reshape(1), 1e-4)


def swiglu() -> None:
    """Multiplies float16 and applies SwiGLU to pairs of 32 columns."""
    from cudnn.gemm.cutedsl.dense.swiglu.api import gemm_swiglu_wrapper_sm100

    a, b = rand(256, 256, dtype=torch.float16), rand(256, 256, dtype=torch.float16, scale=0.1)
    found = gemm_swiglu_wrapper_sm100(columns(a), columns(b))
    expected = a.cpu().double() @ b.cpu().double().T
    close(found["ab12_tensor"][..., 0], expected, 1e-4)
    x, gate = expected.unflatten(1, (-1, 2, 32)).unbind(2)
    close(found["c_tensor"][..., 0], (x * F.silu(gate)).flatten(1), 0.01)


def rht() -> None:
    """Compares an RMS norm followed by a Hadamard transform of 16 values."""
    from cudnn.rmsnorm_rht_amax.api import rmsnorm_rht_amax_wrapper_sm100

    x, w = rand(16, 2048), rand(2048)
    found = rmsnorm_rht_amax_wrapper_sm100(x, w)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    normal = F.rms_norm(x.cpu().double(), (2048,), w.cpu().double(), 1e-5)
    close(found["o_tensor"], (normal.unflatten(1, (-1, 16)) @ matrix / 4).flatten(1), 0.01)


def norm(kind: str) -> None:
    """Compares a norm and its gradients."""
    from cudnn.norm.bprop.api import norm_bprop
    from cudnn.norm.fprop.api import norm_fprop

    x, gamma, dy = rand(16, 1024), rand(1024), rand(16, 1024)
    beta = None if kind == "rms_norm" else rand(1024)
    y, mean, rstd = norm_fprop(kind, x, gamma, beta)
    a, g = x.cpu().double().requires_grad_(), gamma.cpu().double().requires_grad_()
    b = None if beta is None else beta.cpu().double()
    expected = F.rms_norm(a, (1024,), g, 1e-5) if b is None else F.layer_norm(a, (1024,), g, b, 1e-5)
    close(y, expected, 0.01)
    expected.backward(dy.cpu().double())
    dx, dgamma, _ = norm_bprop(kind, dy, x, gamma, mean, rstd, has_beta=beta is not None)
    close(dx, a.grad, 0.01)
    close(dgamma.flatten(), g.grad, 0.02)


def convolution() -> None:
    """Compares a causal convolution of width four with SiLU."""
    from cudnn.causal_conv1d_bulk_sm100.api import causal_conv1d_bulk_fwd_wrapper_sm100

    x, w = rand(1, 64, 512), rand(512, 4)
    with torch.no_grad():
        found = causal_conv1d_bulk_fwd_wrapper_sm100(x, w)["output_tensor"]
    padded = F.pad(x.cpu().double().transpose(1, 2), (3, 0))
    plain = F.conv1d(padded, w.cpu().double()[:, None], groups=512).transpose(1, 2)
    close(found, F.silu(plain), 0.01)


def rope() -> None:
    """Compares the gradient of Q, K and V before the rotation, packed into one tensor."""
    from cudnn.rope.api import vision_rope_backward_wrapper

    tokens = 32
    q, v = (rand(16, tokens, 64).transpose(0, 1) for _ in range(2))
    k = rand(16, 64, tokens).permute(2, 0, 1)
    angles = torch.rand(tokens, 1, 32) * 6
    found = vision_rope_backward_wrapper(q, k, v, angles.cos().cuda(), angles.sin().cuda())["grad_qkv"]
    cos, sin = angles.cos().double(), angles.sin().double()
    back = lambda x: torch.cat(
        (x[..., :32] * cos + x[..., 32:] * sin, x[..., 32:] * cos - x[..., :32] * sin), -1
    )
    parts = [back(q.cpu().double()), back(k.cpu().double()), v.cpu().double()]
    close(found, torch.cat([part.flatten(1) for part in parts], 1), 0.01)


def selection() -> None:
    """Compares attention of a sequence of 128 tokens: 16 query heads share a key head, and select both blocks of 64 keys."""
    from cudnn.native_sparse_attention.selection.api import selection_attention_wrapper

    tokens, heads = 128, 16
    q, k, v = rand(tokens, heads, 128), rand(tokens, 1, 128), rand(tokens, 1, 128)
    indices = torch.zeros(tokens, 1, 2, dtype=torch.int32)
    indices[..., 1] = 1
    counts, ends = torch.full((tokens, 1), 2, dtype=torch.int32), int32([0, tokens])
    found = selection_attention_wrapper(
        q,
        k,
        v,
        indices.cuda(),
        counts.cuda(),
        ends,
        ends,
        block_size=64,
        scale_softmax=128**-0.5,
        max_s_q=tokens,
        max_s_k=tokens,
    )
    a, b, c = (x.cpu().double() for x in (q, k, v))
    close(found["o_tensor"], ((a @ b[:, 0].T) * 128**-0.5).softmax(-1) @ c[:, 0], 0.01)


def bare(name: str, *arguments: str) -> None:
    """Runs a kernel with a reported fault. Its results are not compared."""
    spec = importlib.util.find_spec("cudnn")
    assert spec is not None and spec.origin is not None
    getattr(public_bug_runs, name)(Path(spec.origin).parents[1], (), *arguments)


main(
    {
        "grouped-gemm-quant": partial(bare, "grouped_gemm", "quant"),
        "grouped-gemm-srelu": partial(bare, "grouped_gemm", "srelu"),
        "gemm-amax": amax,
        "gemm-swiglu": swiglu,
        "rms-norm-rht": rht,
        "rms-norm": partial(norm, "rms_norm"),
        "layer-norm": partial(norm, "layer_norm"),
        "causal-conv1d": convolution,
        "vision-rope-backward": rope,
        "nsa-selection": selection,
    }
)
