"""The loop stands under the roof: it knows the rooms below, and none of them, nor itself, knows more than that."""

import ast
from pathlib import Path

import semel

HOUSE = Path(semel.__file__).parent


def imported(file: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
    return found


def test_arrows_run_one_way():
    for file in HOUSE.rglob("*.py"):
        room = file.relative_to(HOUSE).parts[0]
        names = imported(file)
        if room == "loop":
            assert not any(name.startswith("semel.cli") for name in names), file
        elif room != "cli":
            assert not any(name == "semel.loop" or name.startswith("semel.loop.") for name in names), file


def test_driver_and_joiner_start_without_torch():
    import subprocess
    import sys

    code = ("import sys; import semel.loop.driver, semel.loop.supervisor; from semel.loop.sites import SimulatedSite;"
            "from semel.loop import LoopConfig; SimulatedSite(LoopConfig(users=20, past_hours=2)).ask(0);"
            "assert 'torch' not in sys.modules, 'torch'; import semel.loop.joiner; assert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
