"""Instruction handlers, one module per family."""
