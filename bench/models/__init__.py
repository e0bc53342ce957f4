"""Tokens per second of whole models with random weights, and the page of results."""
