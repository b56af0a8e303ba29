"""autofit finds the fastest way to train a PyTorch model within a VRAM budget, by running it."""
