"""Run any command on an emulated GPU: `python -m autofit.emulation --gpu L4 -- COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from autofit.emulation.card import emulated_card
from autofit.emulation.faults import parse_fault
from autofit.emulation.launch import run_emulated
from autofit.emulation.machine import Machine
from autofit.errors import AutofitError
from autofit.units import parse_bytes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        others = parse_bytes(options.held_by_others) if options.held_by_others else 0
        card = emulated_card(options.memory or options.gpu, held_by_others_bytes=others)
        chosen = {"machine": Machine(options.machine)} if options.machine else {}
        return run_emulated(
            options.command,
            cards=[card] * options.devices,
            faults=[parse_fault(text) for text in options.fault],
            nvml=options.nvml,
            values=options.values,
            **chosen,
        )
    except AutofitError as error:
        print(f"python -m autofit.emulation: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m autofit.emulation", description=__doc__)
    parser.add_argument("--gpu", help='a name such as "L4"; default: H200')
    parser.add_argument("--memory", help='like the H200 with this memory, such as "24GiB"')
    parser.add_argument("--devices", type=int, default=1, help="how many such GPUs")
    parser.add_argument("--held-by-others", help="memory that others hold on each")
    parser.add_argument("--machine", help="share the GPUs with all that name the same machine")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        help='calls that fail, as "launch@60=700", "malloc@5x2=2" or "sync@3=hang"',
    )
    parser.add_argument(
        "--nvml",
        action="append",
        default=[],
        choices=("refuse", "noproc", "nomem", "hostpid", "nouuid", "mig"),
        help="how NVML is limited",
    )
    parser.add_argument("--no-values", dest="values", action="store_false", help="compute nothing")
    parser.add_argument("command", nargs="+", help="what to run, after --")
    return parser


if __name__ == "__main__":
    sys.exit(main())
