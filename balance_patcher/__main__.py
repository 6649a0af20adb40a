"""``python -m balance_patcher``; says what is missing if the command line cannot be imported."""

import sys
import traceback

#: As in pyproject.toml. Asked here, where the oldest Python still gets to.
OLDEST = (3, 10)


def run() -> None:
    """Start the command line, or say what it lacks and exit 3: never 1, which would be a finding."""
    if sys.version_info < OLDEST:
        have, need = (".".join(map(str, version[:2])) for version in (sys.version_info, OLDEST))
        sys.stderr.write(f"BP519 Python is too old: this is {have}, and {need} is the oldest that is known\n")
        sys.stderr.write(f"  next      run it with Python {need} or newer\n")
        sys.exit(3)
    try:
        from .cli import main
    except Exception as error:  # noqa: BLE001 - whatever it is, nothing was checked
        name = (getattr(error, "name", None) or "").partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and name in ("typer", "rich", "click"):
            sys.stderr.write(f"BP513 package is missing: the command line needs {name}\n")
            from .extras import command_for

            sys.stderr.write(f"  next      {command_for('cli')}\n")
        else:
            traceback.print_exc()
            sys.stderr.write(f"BP599 unexpected error: {type(error).__name__}: {error}\n")
            sys.stderr.write("  next      report this with the traceback; nothing was checked or patched\n")
        sys.exit(3)
    main()


if __name__ == "__main__":
    run()
