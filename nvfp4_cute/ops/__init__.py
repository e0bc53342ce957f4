"""The public operations: check, plan, dispatch. No device code."""
