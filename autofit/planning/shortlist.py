"""The variants of a large space that a decision looks at.

A table of all draws and all variants takes seconds where a space has thousands of variants, and
hardly any of them is worth a probe. So a few draws of all variants say which ones the table is
about. Each draw names the variants that are fastest there: one is named about as often as it is
likely to be among the fastest (Thompson, Biometrika 25, 1933), so what is known badly is named as
well as what is known to be fast. A small space has a table of all its variants.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autofit.planning.least_squares import Array

MOST_VARIANTS = 256
"""A space of no more variants has no shortlist. With 288 variants a search of 12 probes takes 1.4 s
of one processor, and its seconds grow with the variants."""

SURVEY_DRAWS = 32
"""Draws that name variants for the shortlist."""

_NAMED = MOST_VARIANTS // SURVEY_DRAWS  # by each draw


def shortlist(
    promise: Array, groups: NDArray[np.bool_], values: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Return the variants that a draw names in some group, and the best of every value.

    Args:
        promise: (draws, variants), larger for a better variant; -inf for one that may not be run.
        groups: (groups, variants), which variants are named together.
        values: (settings, variants), the place of each one's value in its setting.
    """
    named = [_best(np.where(group, promise, -np.inf)) for group in groups]
    order = np.argsort(-promise.mean(axis=0), kind="stable")
    firsts = [order[np.unique(places[order], return_index=True)[1]] for places in values]
    return np.unique(np.concatenate([*named, *firsts]))


def _best(promise: Array) -> NDArray[np.intp]:
    """Return the variants that some draw names, those excluded left out."""
    most = min(_NAMED, promise.shape[1])
    named = np.argpartition(-promise, most - 1, axis=1)[:, :most]
    best: NDArray[np.intp] = named[np.take_along_axis(promise, named, axis=1) > -np.inf]
    return best
