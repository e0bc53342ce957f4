"""See _custom_ops."""
