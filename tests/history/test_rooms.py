"""``semel.history`` is a row of rooms: each knows those before it only, so that each can be read and used alone."""

from __future__ import annotations

import ast
from pathlib import Path

import semel.history

HOUSE = Path(semel.history.__file__).parent
ROOMS = ("kernels", "generation", "log", "storage", "view", "reading", "compaction", "writing", "server")


def rooms_known(file: Path) -> set[str]:
    """The rooms, and modules beside them, that a file imports from, wherever in it."""
    known: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("semel.history."):
            known.add((node.module or "").split(".")[2])
        elif isinstance(node, ast.ImportFrom) and node.module == "semel.history":
            known.update(alias.name for alias in node.names)
    return known


def test_arrows_run_one_way() -> None:
    assert {folder.name for folder in HOUSE.iterdir() if (folder / "__init__.py").exists()} == set(ROOMS)
    for place, room in enumerate(ROOMS):
        files = list((HOUSE / room).glob("*.py"))
        assert len(files) > 1
        for file in files:
            later = {"store", "export", "erasure", *ROOMS[place + 1 :]} - ({"store"} if room == "server" else set())
            assert not rooms_known(file) & later, file
    for module in ("arrays", "durable", "errors", "schema", "durations", "reference"):  # the ground
        assert not rooms_known(HOUSE / f"{module}.py") & {*ROOMS, "store", "export", "erasure"}
