"""Notes of what kernels do: the events that take time, and the forms that they ask of the hardware."""
