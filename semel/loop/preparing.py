"""The first start of a loop: a store with what happened before, and a small first model so that there is something to
serve. Each step is whole or not there, so a start that was interrupted goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from semel.history.durable import replace_file
from semel.loop.config import LoopConfig, LoopFolder, Served

FIRST_EPOCHS = 1
LIVE = (("keep_versions", "100000"), ("memory.keep", "100000"), ("version_seconds", "10"))
"""Of the run that follows: nothing is removed but what ``semel.loop.retention`` finds that nobody needs; and what was
learnt is served soon, also by a trainer that never catches up."""


class Stopped(Exception):
    """Somebody asked to stop before the loop was ready."""


def prepare(folder: LoopFolder, config: LoopConfig, say: Callable[[str], None], stopping: threading.Event) -> Path:
    """The run that is served and trained on. Raises Stopped when ``stopping`` is set meanwhile, ValueError for a recipe
    and data that do not fit each other, what reading the data raises, RuntimeError where a command fails."""
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
    log = folder.logs / "prepare.log"
    made = _run("semel.loop.first_run", folder.path, log=log, stopping=stopping)
    replace_file(done, json.dumps(made).encode())
    return Path(made["run"])


def overrides(config: LoopConfig) -> list[str]:
    """The fields that a loop sets, and then those that its user does."""
    return [word for name, value in (*LIVE, *config.assign) for word in ("--set", f"{name}={value}")]


def command(*words: object) -> list[str]:
    """A verb of the ``semel`` command, by this interpreter."""
    return [sys.executable, "-m", "semel.cli", *map(str, words)]


def _run(module: str, *words: object, log: Path, stopping: threading.Event) -> dict[str, str]:
    """The object that a module printed. In a session of its own: a Ctrl-C is for us, who ends it in order."""
    with log.open("a") as errors:
        training = subprocess.Popen([sys.executable, "-m", module, *map(str, words)], stdout=subprocess.PIPE,
                                    stderr=errors, text=True, start_new_session=True)
    try:
        while training.poll() is None:
            if stopping.wait(0.1):
                raise Stopped
        assert training.stdout is not None
        out = training.stdout.read()  # one object, which fits the pipe
    finally:
        training.terminate()
        try:
            training.wait(30)
        except subprocess.TimeoutExpired:
            training.kill()
            training.wait()
    if training.returncode:
        said = [line for line in log.read_text().splitlines() if line.strip()][-1:]
        raise RuntimeError(f"the first training ended with code {training.returncode}: {' '.join(said)} (see {log})")
    return dict(json.loads(out))
