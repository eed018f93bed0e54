"""``python -m specbench``."""

from __future__ import annotations

from specbench.cli import main

if __name__ == "__main__":
    main()
