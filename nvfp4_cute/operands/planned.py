"""Tells whether this thread only collects the kernels that calls need (``compile.cache.planning``), without valid results."""

from contextvars import ContextVar
from typing import Any

keys: ContextVar[dict[Any, None] | None] = ContextVar("planned", default=None)
"""Kernel keys collected so far; None outside of planning."""
