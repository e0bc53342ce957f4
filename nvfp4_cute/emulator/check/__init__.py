"""Findings while kernels run: hazards, races, rules of the chip, bank conflicts."""
