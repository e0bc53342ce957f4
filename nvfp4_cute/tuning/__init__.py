"""Measuring configurations and keeping the best."""
