"""`nvfp4-cute prove`: tests these kernels on a real GPU and writes a report to attach to an issue."""
