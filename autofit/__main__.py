"""The command line, of `autofit` and `python -m autofit` alike."""

import sys


def main() -> None:
    """Run the command line; Ctrl-C ends it with 130 while it is still being imported, too."""
    try:
        from autofit.cli.main import main as run

        run()
    except KeyboardInterrupt:
        from autofit.streams import complain

        complain("autofit: interrupted")
        sys.exit(130)


if __name__ == "__main__":
    main()
