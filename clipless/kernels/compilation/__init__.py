"""Compilers, tracers and CUDA graphs: compiled functions, recorded work, and who traces."""
