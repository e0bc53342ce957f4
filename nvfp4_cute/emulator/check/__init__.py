"""Checks of running kernels: hazards, races, rules of the chip, bank conflicts."""
