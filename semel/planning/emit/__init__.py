"""Launch configurations of the systems that run a plan: ``emit(plan, "torchtitan", folder)``.

Every system gets what it can take: its own options, the order of ranks over devices (``device_mesh.json``), and the
schedule as a CSV file where the runtime reads one.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from semel.planning.plan import Plan

SYSTEMS = {"torchtitan": "torchtitan", "megatron": "megatron", "torchrec": "torchrec", "semel": "own"}
"""System -> module of this package."""


def emit(plan: Plan, system: str, folder: str | Path) -> list[Path]:
    """Write the files with which ``system`` runs ``plan`` into ``folder`` (made if missing) and return them.

    Raises ValueError for an unknown system, and for a plan that the system cannot run, with what it can.
    """
    if system not in SYSTEMS:
        raise ValueError(f"unknown system {system!r} to emit for; there are: {', '.join(SYSTEMS)}")
    files: Callable[[Plan], dict[str, str]] = import_module(f"semel.planning.emit.{SYSTEMS[system]}").files
    texts = files(plan)  # all of them, before one is written
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        path = folder / name
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written
