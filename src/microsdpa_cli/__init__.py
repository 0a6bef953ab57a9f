"""The command line. It lies beside the package `microsdpa`, so that --version and --help do not import torch."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from microsdpa_cli import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in ("microsdpa", "microsdpa_cli"):
            raise
        sys.exit(f"the command line needs {error.name}: pip install 'microsdpa[cli]'")
    app.main()
