"""The first start of a loop: a store with what happened before, and a small first model so that there is something to
serve. Each step is whole or not there, so a start that was interrupted goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from semel.history.durable import replace_file
from semel.loop.config import LoopConfig, LoopFolder, Served

FIRST_EPOCHS = "1"
KEEP_ALL = (("keep_versions", "100000"), ("memory.keep", "100000"))
"""Of the run that follows: whatever was served can be computed again."""


def prepare(folder: LoopFolder, config: LoopConfig, say: Callable[[str], None]) -> Path:
    """The run that is served and trained on. Raises ValueError for a recipe or data that do not fit each other,
    RuntimeError where a command fails."""
    done = folder.path / "run.json"
    if done.exists():
        return Path(json.loads(done.read_text())["run"])
    recipe = config.make_recipe(folder)
    served = Served.of(recipe)
    folder.write_served(served)
    if not (folder.store / "dataset.json").exists():
        from semel.datasets import ingest
        from semel.loop.sites import make_site

        say("the store: what happened before")
        report = ingest(make_site(config, served).past(), folder.store)
        say(f"{report.events:,} events of {report.users:,} users, {report.items:,} items")
    shutil.rmtree(folder.runs, ignore_errors=True)  # of a start that did not come to its end
    say(f"a first model: {recipe.name}, {FIRST_EPOCHS} epoch")
    first = _run("train", recipe.name, "--store", folder.store, "--out", folder.runs, *overrides(config),
                 "--set", f"epochs={FIRST_EPOCHS}", "--json", log=folder.logs / "prepare.log")
    run = _run("train", "--from", first, "--follow", folder.rows, "--until-idle", "0", "--out", folder.runs,
               *overrides(config), "--json", log=folder.logs / "prepare.log")
    replace_file(done, json.dumps({"run": run, "first": first}).encode())
    return Path(run)


def overrides(config: LoopConfig) -> list[str]:
    """The fields that a loop sets, and then those that its user does."""
    return [word for name, value in (*KEEP_ALL, *config.assign) for word in ("--set", f"{name}={value}")]


def command(*words: object) -> list[str]:
    """A verb of the ``semel`` command, by this interpreter."""
    return [sys.executable, "-m", "semel.cli", *map(str, words)]


def _run(*words: object, log: Path) -> str:
    """The run that a training command made."""
    with log.open("a") as errors:
        done = subprocess.run(command(*words), stdout=subprocess.PIPE, stderr=errors, text=True)
    if done.returncode:
        said = [line for line in log.read_text().splitlines() if line.strip()][-1:]
        raise RuntimeError(f"semel {words[0]} ended with code {done.returncode}: {' '.join(said)} (see {log})")
    return str(json.loads(done.stdout)["run"])
