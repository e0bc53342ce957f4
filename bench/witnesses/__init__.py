"""Kernels of packages as people install them, called with small operands and compared with float64 references.

`public_kernels --wheels FOLDER` unpacks the wheels and runs each file here under the emulator, once per kernel and setting.
No code of the packages is stored here.
"""
