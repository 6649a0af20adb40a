"""What does the patch cost? ``python -m tools.bench --help``.

Exit status: 0 measured (also where a target is missed), 1 with ``--check`` when a target is not met for sure or a part
could not be measured, 2 wrong usage, 3 could not measure anything.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit."""
    root = str(Path(__file__).resolve().parents[1])
    if root not in sys.path:
        sys.path.insert(0, root)
    try:
        from tools.measuring.cli import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(f"BP513 package is missing: the bench needs {error.name}\n")
        sys.stderr.write("  next      pip install -e '.[cli]'\n")
        sys.exit(3)
    run(arguments)


if __name__ == "__main__":
    main()
