"""Whole models in vLLM: the plug-in compared with bf16 and vLLM's own methods. ``python -m nvfp4_cute.bench.vllm --help``."""
