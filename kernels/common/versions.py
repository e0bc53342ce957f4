"""What moved between versions of CuTe DSL: the newest place first. A one-file submission takes these from here."""

try:
    from cutlass.memory import SmemAllocator, TmemAllocator
except ImportError:
    from cutlass.utils import SmemAllocator, TmemAllocator

__all__ = ["SmemAllocator", "TmemAllocator"]
