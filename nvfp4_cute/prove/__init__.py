"""`nvfp4-cute prove`: what a GPU really does with these kernels, as a report that a person can attach to an issue."""
