"""The simulated CUDA caching allocator, and the tracer that feeds it."""
