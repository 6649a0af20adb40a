"""Will balance scheduling help this load? A discrete-event simulation: ``python -m tools.simulate --help``.

It drives the real scheduler classes of a lane, one instance a rank, in the lane's own Python. Exit status: 0 simulated,
2 wrong usage or a bad trace, 3 could not simulate, 130 interrupted (finished parts are kept).
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
        from tools.simulator.cli import main as run
    except ModuleNotFoundError as error:
        sys.stderr.write(f"BP513 package is missing: the simulator needs {error.name}\n")
        sys.stderr.write("  next      pip install -e '.[cli]'\n")
        sys.exit(3)
    run(arguments)


if __name__ == "__main__":
    main()
