"""The public operations. Each checks its operands, plans the launch and dispatches it; device code is in ``kernels``."""
