"""How far modelled times are from measured ones: calls predicted before anybody measures them, and other people's kernels."""
