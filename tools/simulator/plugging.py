"""A folder on the path that plugs the recorder of steps into vLLM: a distribution's metadata, with one entry point."""

from __future__ import annotations

from pathlib import Path

from balance_patcher.errors import refuse

from . import recorder

ROOT = Path(__file__).resolve().parents[2]

METADATA = "Metadata-Version: 2.1\nName: balance-steps\nVersion: 1\n"


def plug_in(folder: Path) -> list[str]:
    """Make the folder; what is to be put in front of the command that starts vLLM.

    Raises:
        PatchError: BP515, if nothing can be written there.
    """
    info = folder.resolve() / "balance_steps-1.dist-info"
    try:
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(METADATA, encoding="utf-8")
        entry = f"[vllm.general_plugins]\nbalance_steps = {recorder.__name__}:{recorder.register.__name__}\n"
        (info / "entry_points.txt").write_text(entry, encoding="utf-8")
    except OSError as error:
        raise refuse("BP515", f"{folder}: {error.strerror}", next="check the path and its rights") from error
    place = folder.resolve()
    return [
        f"export PYTHONPATH={place}:{ROOT}${{PYTHONPATH:+:$PYTHONPATH}} {recorder.FOLDER}={place}",
        f"# start vLLM, send it requests, end it; then: python -m tools.simulate fit {folder / 'steps-*.csv'}",
    ]
