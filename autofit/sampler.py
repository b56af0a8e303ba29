"""The search as an Optuna sampler, for any study over the same parameters.

sampler = Sampler({"amp": [False, True]}, sample_batch_size=8, vram_budget="24GiB")
study = optuna.create_study(direction="maximize", sampler=sampler)
"""

from autofit.searching.sampler import Sampler as Sampler

__all__ = ["Sampler"]
