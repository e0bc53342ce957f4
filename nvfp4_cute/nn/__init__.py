"""Modules of torch.nn with block-scaled weights, for inference."""
