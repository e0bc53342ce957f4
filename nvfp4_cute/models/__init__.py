"""Whole models: checkpoints of quantization tools, transformers, quantizing, and tokens per second."""
