"""Checked views of the operands of every form."""
