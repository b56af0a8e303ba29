"""Behaviour of CUDA that the meta device lacks: kernels, scratch memory, autocast."""
