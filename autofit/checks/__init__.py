"""Capacity checks: does a workload fit, has it grown, and does a tuned plan hold for long?"""
