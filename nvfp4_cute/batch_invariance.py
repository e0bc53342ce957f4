"""Whether the bits of a row are independent of the other rows: a setting of the process, and of a call."""

from contextvars import ContextVar

from nvfp4_cute import private_api
from nvfp4_cute.errors import UnsupportedProblem

_of_process = False
_of_call: ContextVar[bool | None] = ContextVar("batch_invariant", default=None)


class set_batch_invariant:  # noqa: N801, reads as torch.set_grad_enabled does
    """Make results batch-invariant: the bits of a row do not depend on the other rows. Off by default.

    The bits of an output row are then a function of that row's input, the weights and the GPU's architecture; not of the number
    of rows, of their order, or of the experts of other tokens. Every kernel adds up K in one order, and kernels for few rows are
    not used. ``nvfp4_cute/ops/BATCH_INVARIANCE.md`` says what is promised, and what it costs. ``Options(batch_invariant=True)``
    decides for one call.

    Args:
        enabled: True switches it on, False off; until the end of the process, or of a ``with`` block.

    Raises:
        TypeError: ``enabled`` is not a bool.
        UnsupportedProblem: torch.compile traces the call.

    Example:
        >>> with nvfp4_cute.set_batch_invariant():
        ...     torch.equal(gemm(x, w)[:1], gemm(x[:1], w))
        True
    """

    def __init__(self, enabled: bool = True):
        global _of_process
        if not isinstance(enabled, bool):
            raise TypeError(f"enabled={enabled!r} is not a bool; pass True or False")
        if private_api.is_traced():  # a graph keeps the operations, and would set the flag only after them
            raise UnsupportedProblem(
                "set_batch_invariant in a function that torch.compile traces: call it before the compiled function"
            )
        self._before, _of_process = _of_process, enabled

    def __enter__(self) -> "set_batch_invariant":
        return self

    def __exit__(self, *_: object) -> None:
        global _of_process
        _of_process = self._before


class of_call:  # noqa: N801, a context manager of two instructions: every call may enter one
    """Decides for the calls inside of a ``with`` block; None leaves the decision to the process."""

    def __init__(self, enabled: bool | None):
        self._enabled = enabled

    def __enter__(self) -> None:
        self._token = _of_call.set(self._enabled)

    def __exit__(self, *_: object) -> None:
        _of_call.reset(self._token)


def is_batch_invariant() -> bool:
    """Returns whether the current call is batch-invariant."""
    chosen = _of_call.get()
    return _of_process if chosen is None else chosen


def refuse_found_scales() -> None:
    """Raises UnsupportedProblem if a batch-invariant layer would compute the global scale of its input, from all rows."""
    if is_batch_invariant():
        raise UnsupportedProblem(
            'input_scale="auto" is computed from all rows, so a row\'s bits would depend on the others; pass '
            'input_scale="per_row", a calibrated number, None for 1, or 16-bit activations'
        )


def is_layer_invariant() -> bool:
    """Returns whether a layer's call is batch-invariant, also while torch.compile traces it."""
    # A graph of torch.compile cannot read a ContextVar, and no single call in it decides.
    return _of_process if private_api.is_traced() else is_batch_invariant()


def refuse_capture(layers: str) -> None:
    """Raises UnsupportedProblem if a batch-invariant call would be captured separately, because scales cannot be read now."""
    if is_layer_invariant():
        raise UnsupportedProblem(
            f"scales of {layers} were written after the last eager call, and a CUDA graph that is captured now would hold "
            "separate products, whose bits may differ from those of the common one; call the layer once before the capture"
        )


def refuse_product_of_torch(option: str) -> None:
    """Raises UnsupportedProblem if a batch-invariant layer would multiply in torch, as ``option`` asks for."""
    if is_layer_invariant():
        raise UnsupportedProblem(
            f"{option} multiplies in torch, whose order of sums depends on the number of rows; make the layer without it"
        )
