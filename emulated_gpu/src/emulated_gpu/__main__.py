"""The command: `emulated-gpu run --gpu L4 -- COMMAND` and `emulated-gpu doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from emulated_gpu.cards import DEFAULT, find_card
from emulated_gpu.doctor import diagnose
from emulated_gpu.errors import EmulatedGpuError, InvalidArgument
from emulated_gpu.faults import parse_fault
from emulated_gpu.launch import NVML_LIMITS, run
from emulated_gpu.machines import Machine
from emulated_gpu.sizes import parse_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--") if "--" in given else len(given)
    own, command = given[:at], given[at + 1 :]
    options, astray = _parser().parse_known_args(own)
    try:
        if astray:
            raise InvalidArgument(
                f"{' '.join(astray)} is not understood: the command to run goes after --, as in "
                "`emulated-gpu run --gpu L4 -- python train.py`"
            )
        if options.what == "doctor":
            return diagnose()
        if not command:
            raise InvalidArgument(
                "say what to run, after --: `emulated-gpu run -- python train.py`"
            )
        return _run(options, command)
    except EmulatedGpuError as error:
        print(f"emulated-gpu: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace, command: Sequence[str]) -> int:
    card = find_card(
        options.gpu,
        memory=options.memory,
        held_by_others_bytes=parse_size(options.held_by_others) if options.held_by_others else 0,
    )
    return run(
        command,
        cards=[card] * options.devices,
        machine=Machine(options.machine) if options.machine else None,
        faults=[parse_fault(text) for text in options.fault],
        nvml=options.nvml,
        values=options.values,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "emulated-gpu", description="Run CUDA programs of PyTorch on a machine without a GPU."
    )
    commands = parser.add_subparsers(dest="what", required=True, metavar="run | doctor")
    run = commands.add_parser(
        "run",
        help="run a command on an emulated GPU",
        usage="emulated-gpu run [options] -- COMMAND [ARGUMENTS]",
    )
    run.add_argument("--gpu", help=f'a name such as "L4" or "RTX 4090"; default: {DEFAULT}')
    run.add_argument("--memory", help='of each card, such as "24GiB"; default: that of the GPU')
    run.add_argument("--devices", type=_count, default=1, help="how many such cards; default: 1")
    run.add_argument("--held-by-others", metavar="SIZE", help="memory that others hold on each")
    run.add_argument(
        "--machine", metavar="NAME", help="share the cards with all that name the same machine"
    )
    run.add_argument(
        "--fault",
        action="append",
        default=[],
        help='calls that fail, as "launch@60=700", "malloc@5x2=2" or "sync@3=hang"; repeatable',
    )
    run.add_argument(
        "--nvml",
        action="append",
        default=[],
        choices=NVML_LIMITS,
        help="what NVML does not tell, as in containers; repeatable",
    )
    run.add_argument(
        "--no-values",
        dest="values",
        action="store_false",
        help="kernels compute nothing: quicker; losses mean nothing",
    )
    commands.add_parser("doctor", help="say whether it works here, and what is missing")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"give a whole number of cards, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
