"""A report's best plan as text that another stack takes, by the stack's name.

What a stack has no argument for stands in the text's comments, with the code that does it.
"""

from __future__ import annotations

from collections.abc import Callable

from autofit.errors import InvalidArgument
from autofit.report.export import pytorch, trainers
from autofit.report.record import Record

EXPORTS: dict[str, Callable[[Record], str]] = {
    "pytorch": pytorch.loop,
    "transformers": trainers.training_arguments,
    "accelerate": trainers.accelerate_config,
    "lightning": trainers.lightning_trainer,
    "deepspeed": trainers.deepspeed_config,
}
"""The stack's name -> what writes its text."""


def check_stack(stack: str) -> None:
    """Refuse a stack that there is no export for.

    Raises:
        InvalidArgument: it is another.
    """
    if stack not in EXPORTS:
        raise InvalidArgument(f"there is no export {stack!r}; there are: {', '.join(EXPORTS)}")


def exported(record: Record, stack: str) -> str:
    """Return the best plan as a stack's text.

    Raises:
        InvalidArgument: another stack, or the plan cannot be written for it.
    """
    check_stack(stack)
    return EXPORTS[stack](record)
