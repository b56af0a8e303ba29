"""Exhaustive grids recorded on real GPUs, as worlds that a planner can be tried on."""
