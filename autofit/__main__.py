"""The command line, of `autofit` and `python -m autofit` alike."""

import atexit
import gc
import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it with 130 while it is still being imported, too."""
    atexit.register(gc.freeze)  # else the interpreter takes 0.4 s to collect torch as it ends
    try:
        from autofit.cli.main import main as run

        run()
    except KeyboardInterrupt:
        from autofit.streams import complain

        complain("autofit: interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
