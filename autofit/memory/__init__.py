"""What a training holds: the CUDA caching allocator, simulated, and the tracer that feeds it."""
