"""Whole models in vLLM: the plug-in next to bf16 and to vLLM's own methods. ``python -m nvfp4_cute.bench.vllm --help``."""
