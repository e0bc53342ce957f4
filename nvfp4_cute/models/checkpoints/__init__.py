"""Readers of quantized checkpoints, one per tool, which all return the same types."""

from nvfp4_cute.models.checkpoints.checkpoint import Checkpoint
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear

__all__ = ["Checkpoint", "Scheme", "StoredExperts", "StoredLinear"]
