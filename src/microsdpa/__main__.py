"""`microsdpa` and `python -m microsdpa`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from microsdpa import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "microsdpa":
            raise
        sys.exit(f"the command line needs {error.name}: pip install 'microsdpa[cli]'")
    cli.main()


if __name__ == "__main__":
    main()
