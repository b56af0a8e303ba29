"""Print the README's first example of a search as a script for a machine without a GPU.

    python .ci/readme_example.py > example.py

What the example leaves to its reader (a model, a batch, a loader) stands before it, and the search
gets a small budget on the CPU.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"
READERS_OWN = """\
import torch
from torch import nn

import autofit

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
loss = nn.CrossEntropyLoss()
sample_batch = batch = (torch.randn(32, 64), torch.randint(0, 10, (32,)))
optimizer = torch.optim.AdamW(model.parameters())
loader = [(torch.randn(256, 64), torch.randint(0, 10, (256,))) for _ in range(3)]
"""
ON_THE_CPU: dict[str, str | int] = {"device": "cpu", "vram_budget": "64MiB", "timeout": 120}
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class _OnTheCpu(ast.NodeTransformer):
    """Gives each search the arguments that a machine without a GPU needs."""

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if ast.unparse(node.func) == "autofit.search":
            kept = [each for each in node.keywords if each.arg not in ON_THE_CPU]
            added = [ast.keyword(name, ast.Constant(value)) for name, value in ON_THE_CPU.items()]
            node.keywords = kept + added
        return node


def example(readme: str) -> str:
    """Return the script.

    Raises:
        LookupError: no example of the README calls `autofit.search`.
    """
    for block in _BLOCK.findall(readme):
        if "autofit.search(" in block:
            tree = ast.fix_missing_locations(_OnTheCpu().visit(ast.parse(block)))
            return f"{READERS_OWN}\n{ast.unparse(tree)}\n"
    raise LookupError("the README has no example that calls autofit.search")


if __name__ == "__main__":
    print(example(README.read_text()))
