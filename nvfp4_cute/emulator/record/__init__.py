"""Records of running kernels: the events that take time, and the forms of hardware use."""
