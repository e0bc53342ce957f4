"""Readers of quantized checkpoints, one a tool, and the form that all of them give."""

from nvfp4_cute.models.checkpoints.checkpoint import Checkpoint
from nvfp4_cute.models.checkpoints.stored import Scheme, StoredExperts, StoredLinear, StoredWeight

__all__ = ["Checkpoint", "Scheme", "StoredExperts", "StoredLinear", "StoredWeight"]
