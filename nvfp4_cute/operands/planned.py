"""Whether this thread only asks which kernels calls take (``compile.cache.planning``): results hold anything then."""

from contextvars import ContextVar
from typing import Any

keys: ContextVar[dict[Any, None] | None] = ContextVar("planned", default=None)
"""Keys asked for so far; None outside of planning."""
