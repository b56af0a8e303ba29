"""What an emulated GPU raises where it cannot be had."""

from __future__ import annotations

from autofit.errors import AutofitError


class EmulationUnavailable(AutofitError):
    """There is no emulated GPU here: the message says what is missing and how to get it."""
