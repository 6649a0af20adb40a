"""``python -m balance_patcher``; says which extra is missing if the command line cannot be imported."""

import sys


def run() -> None:
    """Start the command line, or say what it lacks and exit 3."""
    try:
        from .cli import main
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(
            f"BP513 package is missing: the command line needs {error.name}\n"
            "  next      pip install 'balance_patcher[cli]'\n"
        )
        sys.exit(3)
    main()


if __name__ == "__main__":
    run()
