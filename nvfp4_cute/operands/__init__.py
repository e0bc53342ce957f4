"""Checks of operands in every form, and the views of them that launches take."""
