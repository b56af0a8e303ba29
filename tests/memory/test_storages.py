"""Tensors in nested values, and the storages behind tensors."""

from __future__ import annotations

import torch

from autofit.memory.storages import storages_of, tensors_in


def test_tensors_at_any_depth() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert list(tensors_in({"x": [a, (b, None)], "y": {"z": c}, "n": 3})) == [a, b, c]


def test_a_view_has_the_storage_of_its_base() -> None:
    base = torch.ones(10)
    assert storages_of(base[2:5])[0]._cdata == storages_of(base)[0]._cdata


def test_a_sparse_tensor_has_one_for_each_part() -> None:
    dense = torch.eye(4)
    assert [s.nbytes() for s in storages_of(dense.to_sparse())] == [2 * 4 * 8, 4 * 4]
    assert len(storages_of(dense.to_sparse_csr())) == 3
