"""`python -m microsdpa`, which is the command `microsdpa`."""

from __future__ import annotations

from microsdpa_cli import main

if __name__ == "__main__":
    main()
