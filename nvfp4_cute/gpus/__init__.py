"""Figures of each GPU, and what has run on it."""
