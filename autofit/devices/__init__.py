"""Devices: where a training runs, what it may hold there, and how long it takes."""
