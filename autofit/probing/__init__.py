"""Probes: one plan, run for a few optimizer steps where it can do no harm."""
