"""Whether a person watches, and how objects show themselves in a notebook.

What they show is a line and a table, as HTML that needs no script.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from html import escape
from importlib import import_module
from typing import Any

_CELL = "padding:2px 12px 2px 0;border:0;background:none"


def shown(
    lines: Iterable[str], table: Iterable[Sequence[str]] = (), code: Iterable[str] = ()
) -> str:
    """Return HTML for `_repr_html_`: whatever a text contains is shown as it is.

    Args:
        lines: the first one stands out.
        table: rows of cells.
        code: lines to paste.
    """
    first, *others = lines
    parts = [f'<p style="font-weight:600;margin:0 0 6px">{escape(first)}</p>']
    parts += (f'<p style="margin:0 0 4px">{escape(line)}</p>' for line in others)
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in table)
    if body:
        parts.append(f'<table style="border-collapse:collapse;margin:6px 0">{body}</table>')
    if text := "\n".join(code):
        parts.append(f'<pre style="margin:6px 0">{escape(text)}</pre>')
    return f'<div style="max-width:60em">{"".join(parts)}</div>'


def is_watched() -> bool:
    """Return whether a person sees standard error as it is written: a terminal or a notebook."""
    try:
        return in_notebook() or sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, it can only be written to, or is closed
        return False


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


class ChangingLine:
    """A line below a notebook's cell; each text replaces the one before."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, text: str) -> None:
        """Show this text in the line."""
        data = {"text/plain": text}
        if self._handle is None:
            display = import_module("IPython.display").display
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


def _cells(row: Sequence[str]) -> str:
    return "".join(f'<td style="{_CELL};text-align:left">{escape(cell)}</td>' for cell in row)
