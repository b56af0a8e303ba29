"""Devices: where a training runs, within which memory, and how time is measured."""
