"""Quantizing a checkpoint: which layers, how they are rounded, calibration, and the layouts that are written."""
