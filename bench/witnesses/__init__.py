"""Calls of kernels from released wheels, with small operands. Most results are compared with references in float32 or float64.

`public_kernels --wheels FOLDER` unpacks the wheels and runs each file here under the emulator, once per kernel and setting.
No code of the packages is stored here.
"""
