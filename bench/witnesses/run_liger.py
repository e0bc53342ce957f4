"""Liger: forward and backward of its CuTe DSL implementations, compared with torch in float32."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from liger_kernel import functional

from nvfp4_cute.bench.witnesses.support import close, main, rand

ROWS, COLUMNS = 32, 512
IMPL = "nvidia-cutedsl"
Function = Callable[..., torch.Tensor]


def compare(function: Function, reference: Function, *inputs: torch.Tensor) -> None:
    """Compares a function of `inputs` and its gradients. Inputs that are not floating point have no gradient."""
    given = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    exact = [x.detach().cpu().float().requires_grad_() if x.is_floating_point() else x.cpu() for x in inputs]
    found, expected = function(*given), reference(*exact)
    close(found, expected, 0.02)
    gradient = torch.randn(expected.shape)
    found.backward(gradient.to(found.dtype).cuda())
    expected.backward(gradient)
    for x, y in zip(given, exact, strict=True):
        if y.is_floating_point() and y.grad is not None:
            close(x.grad, y.grad, 0.02)


def cross_entropy() -> None:
    """Compares the loss and its gradient."""
    labels = torch.randint(0, COLUMNS, (ROWS,)).cuda()
    first = lambda x, t: functional.cross_entropy(x, t, impl=IMPL)[0]
    compare(first, F.cross_entropy, rand(ROWS, COLUMNS, dtype=torch.float32), labels)


def added(x: torch.Tensor, r: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Returns the RMS norm of a sum."""
    return F.rms_norm(x + r, (COLUMNS,), w, 1e-6)


def of(name: str, reference: Function, *shapes: tuple[int, ...], **options: object) -> Callable[[], None]:
    """Returns a function that compares an operation on normally distributed inputs."""
    run = lambda *inputs: getattr(functional, name)(*inputs, impl=IMPL, **options)
    return lambda: compare(run, reference, *(rand(*shape) for shape in shapes))


def divergence(name: str, reference: Function) -> None:
    """Compares a divergence of log-probabilities."""
    logs = [F.log_softmax(torch.randn(ROWS, COLUMNS), -1).cuda() for _ in range(2)]
    target = logs[1] if name == "jsd" else logs[1].exp()
    given = lambda x: getattr(functional, name)(x, target, impl=IMPL)
    compare(given, lambda x: reference(x, target.cpu()), logs[0])


def jsd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Returns the Jensen-Shannon divergence of log-probabilities per row."""
    mean = ((x.exp() + y.exp()) / 2).log()
    return (
        F.kl_div(mean, x, reduction="sum", log_target=True)
        + F.kl_div(mean, y, reduction="sum", log_target=True)
    ) / (2 * ROWS)


wide, row = (ROWS, COLUMNS), (COLUMNS,)
main(
    {
        "rms-norm": of("rms_norm", lambda x, w: F.rms_norm(x, row, w, 1e-6), wide, row),
        "layer-norm": of("layer_norm", lambda x, w, b: F.layer_norm(x, row, w, b, 1e-6), wide, row, row),
        "softmax": of("softmax", lambda x: x.softmax(-1), wide),
        "swiglu": of("swiglu", lambda a, b: F.silu(a) * b, wide, wide),
        "geglu": of("geglu", lambda a, b: F.gelu(a, approximate="tanh") * b, wide, wide),
        "add-rms-norm": lambda: compare(
            lambda *inputs: functional.fused_add_rms_norm(*inputs, impl=IMPL)[0],
            added,
            rand(*wide),
            rand(*wide),
            rand(*row),
        ),
        "cross-entropy": cross_entropy,
        "kl-div": partial(divergence, "kl_div", partial(F.kl_div, reduction="batchmean")),
        "jsd": partial(divergence, "jsd", jsd),
    }
)
