"""Tokens per second of whole models with random weights."""
