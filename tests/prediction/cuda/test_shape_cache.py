"""Results that are remembered look as they would have been computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autofit.prediction.cuda.shape_cache import ShapeCache

aten: Any = torch.ops.aten


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Runs:
    """Runs operators, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.count += 1
        return func(*args, **kwargs)


def looks(result: Any) -> list[Any]:
    tensors = result if isinstance(result, (tuple, list)) else [result]
    return [(t.shape, t.stride(), t.dtype, t.device) if t is not None else None for t in tensors]


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten.add.Tensor, (on_meta(4, 8).t(), on_meta(1, 4))),
        (aten.native_layer_norm.default, (on_meta(2, 3, 8), [8], on_meta(8), on_meta(8), 1e-5)),
        (aten.native_layer_norm_backward.default,
         (on_meta(3, 8), on_meta(3, 8), [8], on_meta(3, 1), on_meta(3, 1), None, None,
          [True, False, False])),
        (aten.sum.dim_IntList, (on_meta(4, 8, dtype=torch.bfloat16), [0])),
    ],
    ids=["add", "normalize", "some results", "sum"],
)  # fmt: skip
def test_a_second_time_nothing_is_run_and_the_result_looks_the_same(func: Any, args: Any) -> None:
    shapes, run = ShapeCache(), Runs()
    first, again = (shapes.result(func, args, {}, run) for _ in range(2))
    assert run.count == 1
    assert looks(again) == looks(first) == looks(func(*args))
    assert type(again) is type(first)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (aten._unsafe_view.default, (on_meta(4, 8), [8, 4])),
        (aten.unsafe_split.Tensor, (on_meta(4, 8), 2)),
        (aten.t.default, (on_meta(4, 8),)),
        (aten.add_.Tensor, (on_meta(4), on_meta(4))),
        (aten.add.Tensor, (torch.ones(4), torch.ones(4))),
    ],
    ids=["quiet alias", "quiet views", "view", "in place", "on the host"],
)
def test_what_makes_no_new_tensors_on_the_device_is_always_run(func: Any, args: Any) -> None:
    shapes, run = ShapeCache(), Runs()
    for _ in range(2):
        shapes.result(func, args, {}, run)
    assert run.count == 2


def test_arguments_that_are_equal_and_of_another_type_are_distinguished() -> None:
    shapes, run, whole = ShapeCache(), Runs(), on_meta(4, dtype=torch.int64)
    types = [shapes.result(aten.add.Tensor, (whole, one), {}, run).dtype for one in (1, 1.0, True)]
    assert types == [torch.int64, torch.float32, torch.int64]
