"""Measurements of autofit itself, and the workloads they use."""
