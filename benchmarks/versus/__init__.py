"""Batch-size finders and searches side by side, each run as its users run it."""
