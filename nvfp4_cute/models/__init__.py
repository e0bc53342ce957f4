"""Whole models: checkpoints of quantization tools, transformers, vLLM, quantization, accuracy and speed."""
