"""What every one-file submission needs on its way from tensors to a launch: addresses, the pointer that crosses into compiled
code, errors that a server can send."""

from functools import wraps

INT64_BYTES = 8


def sendable_errors(function):
    """Exceptions of the compiler cannot be sent from the server's worker process to its parent; their text can."""

    @wraps(function)
    def call(data):
        try:
            return function(data)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    return call


def scale_address(scale) -> int:
    """Address of permuted scales [32, 4, rm, 4, rk, L], whose memory is used as it lies.

    Raises:
        ValueError: they are not a view of contiguous [L, rm, rk, 32, 4, 4].
    """
    if not scale.permute(5, 2, 4, 0, 1, 3).is_contiguous():
        raise ValueError(
            f"scales of shape {tuple(scale.shape)} have strides {scale.stride()}; pass the (32, 4, rm, 4, rk, L) view of "
            "contiguous [L, rm, rk, 32, 4, 4]"
        )
    return scale.data_ptr()


def table_pointer(address: int):
    """What compiled host code takes: the address of a launch table in host memory."""
    import cutlass
    import cutlass.cute as cute

    return cute.runtime.make_ptr(cutlass.Int64, address, cute.AddressSpace.generic, assumed_align=INT64_BYTES)


def permuted_scale(scale):
    """The competition's view, [32, 4, rm, 4, rk, 1], of contiguous scales [rm, rk, 32, 4, 4]."""
    return scale[None].permute(3, 4, 1, 5, 2, 0)
