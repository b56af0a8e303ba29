"""Trainings recorded on a GPU: their models, what the allocator did, the limits that worked."""
