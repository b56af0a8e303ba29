"""What CUDA does and the meta device does not: kernels, scratch memory, autocast."""
