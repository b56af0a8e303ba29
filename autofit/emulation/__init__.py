"""An emulated GPU: the CUDA build of torch runs on a machine without one.

The caching allocator, the operators and their errors are torch's own; the driver and the kernels
are emulated (`sources/`). It is loaded into processes that are started for it, never into this one.
"""
