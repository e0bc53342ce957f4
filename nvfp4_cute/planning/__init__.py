"""Which kernel configuration computes a problem, and how its tiles are dealt."""
