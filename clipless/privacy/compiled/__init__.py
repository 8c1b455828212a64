"""Compiled calls and CUDA graphs: adapters around the private step."""
