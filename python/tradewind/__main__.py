"""`python -m tradewind`: the command line."""

from __future__ import annotations

from tradewind.launch.cli import main

if __name__ == "__main__":
    main(prog_name="tradewind")
