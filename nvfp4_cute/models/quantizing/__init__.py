"""Quantizes a checkpoint: selection of layers, rounding, calibration, and the layouts that are written."""
