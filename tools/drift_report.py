"""Say what became of every declared delta along upstream's history: ``python -m tools.drift_report --help``.

Exit status as ``verify``: 0 nothing needs an edit, 1 something does, 2 wrong usage, 3 could not check. It can be run as
a file, too; each process that it starts imports this module, so nothing is imported at its top.
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
        from tools.drift.cli import main as run
    except ModuleNotFoundError as error:
        # With Python's own status 1 this would read as a finding.
        sys.stderr.write(f"BP513 package is missing: the drift report needs {error.name}\n")
        sys.stderr.write("  next      pip install -e '.[tools]'\n")
        sys.exit(3)
    run(arguments)


if __name__ == "__main__":
    main()
