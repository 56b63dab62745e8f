"""The C part: a launcher of planned products, compiled on first use where there is a C compiler.

It reads no CUDA header and links nothing of CUDA or Python, whose functions it gets as addresses: so there is nothing
to build when the package is installed, and one file serves every version of both. What it does, Python does too, only
slower.
"""
