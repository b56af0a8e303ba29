"""Operators whose kernels are NVIDIA's libraries' have the values of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytestmark = pytest.mark.emulated

Run = Callable[..., str]

LINEAR_ALGEBRA = """
import torch
torch.manual_seed(0)
dirty = [torch.full((64,), 7, dtype=torch.int32, device="cuda") for _ in range(4096)]
del dirty  # what is freed is given again
any_, linalg = torch.randn(6, 6), torch.linalg
whole = any_ @ any_.T + 6 * torch.eye(6)
stack = torch.stack([whole, 2 * whole])
asked = {
    "cholesky": lambda to: [linalg.cholesky(to(whole))],
    "solve": lambda to: [linalg.solve(to(whole), to(any_))],
    "inv": lambda to: [linalg.inv(to(stack))],
    "qr": lambda to: linalg.qr(to(any_)),
    "svdvals": lambda to: [linalg.svdvals(to(any_)), linalg.svdvals(to(stack))],
    "eigvalsh": lambda to: [linalg.eigvalsh(to(whole)), linalg.eigvalsh(to(stack))],
    "eigvals": lambda to: [linalg.eigvals(to(whole)).abs().sort()[0]],
    "lu": lambda to: linalg.lu_factor(to(any_)),
    "fft": lambda to: [torch.fft.rfft(to(any_)).abs()],
}
for name, function in asked.items():
    host, card = function(lambda given: given), function(lambda given: given.cuda())
    for expected, found in zip(host, card):
        if not torch.allclose(expected, found.cpu(), atol=1e-3):
            print(name, expected, found)
try:
    linalg.inv(torch.zeros(6, 6, device="cuda"))
except linalg.LinAlgError:
    print("a singular matrix is refused")
"""


SPARSE = """
import torch
from emulated_gpu import estimates
identity, given = torch.eye(6, device="cuda").to_sparse(), torch.ones(6, 6, device="cuda")
assert not any("SpMM" in each for each in estimates())
torch.sparse.mm(identity, given)
print(*estimates())
"""


def test_linear_algebra_has_the_values_of_the_cpu(run_on: Run) -> None:
    assert run_on(LINEAR_ALGEBRA, values=True) == "a singular matrix is refused\n"


def test_a_product_that_only_cusparse_computes_is_noted(run_on: Run) -> None:
    assert "cusparseSpMM" in run_on(SPARSE, values=True).split()


INTEGERS = """
import torch
mask, weights = torch.ones(2, 8, dtype=torch.long).cuda(), torch.ones(8, device="cuda")
mask[1, 5:] = 0
lengths = mask.cumsum(-1)[:, -1]
flag = torch.full((), 7.0, device="cuda").add_(1)
print(lengths.tolist(), bool((mask == 1).all()), flag.item(), (weights + 1).sum().item())
"""


def test_integers_alone_have_values_where_that_is_asked_for(run_on: Run) -> None:
    assert run_on(INTEGERS, values="integers") == "[8, 5] False 8.0 0.0\n"
    assert run_on(INTEGERS, values=True) == "[8, 5] False 8.0 16.0\n"
