"""Chooses a kernel configuration for a problem and assigns tiles to CTAs."""
