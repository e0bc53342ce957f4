"""Errors of modelled times: calls predicted before they were measured, and other people's kernels."""
