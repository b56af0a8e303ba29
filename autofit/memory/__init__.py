"""What a training holds in memory: the CUDA caching allocator, simulated, and a tracer that feeds it."""
