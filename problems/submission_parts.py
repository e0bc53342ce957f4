"""Parts of every one-file submission: addresses, pointers for compiled code, and errors that a server can send."""

from functools import wraps

INT64_BYTES = 8


def sendable_errors(function):
    """Wraps a function so that compiler exceptions become picklable: a server's worker process sends them to its parent."""

    @wraps(function)
    def call(data):
        try:
            return function(data)
        except Exception as error:
            raise RuntimeError(f"{type(error).__name__}: {error}") from None

    return call


def scale_address(scale) -> int:
    """Returns the address of permuted scales [32, 4, rm, 4, rk, L], whose memory is used in place.

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
    """Converts the address of a launch table in host memory to the argument of compiled host code."""
    import cutlass
    import cutlass.cute as cute

    return cute.runtime.make_ptr(cutlass.Int64, address, cute.AddressSpace.generic, assumed_align=INT64_BYTES)


def permuted_scale(scale):
    """Views contiguous scales [rm, rk, 32, 4, 4] in the competition's form, [32, 4, rm, 4, rk, 1]."""
    return scale[None].permute(3, 4, 1, 5, 2, 0)
