"""`python -m autofit` is the command line."""

from autofit.cli.main import main

if __name__ == "__main__":
    main()
