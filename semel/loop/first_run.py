"""``python -m semel.loop.first_run FOLDER``: what a loop serves first, and the run that follows from it.

Both in one process: to load what training needs takes longer than so little training does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from semel.loop.config import LoopFolder
from semel.loop.preparing import FIRST_EPOCHS, LIVE
from semel.training import Follower, Trainer, override


def main(path: str) -> None:
    """Prints one object: ``first``, a model trained on what happened before, and ``run``, which goes on from it."""
    folder = LoopFolder(path)
    config, _ = folder.load()
    recipe = override(config.make_recipe(folder), dict((*LIVE, *config.assign)))
    first = Trainer(override(recipe, {"epochs": FIRST_EPOCHS})).fit().path
    run = Follower(recipe, folder.rows, start=first).fit(until_idle=0).path
    print(json.dumps({"first": str(Path(first)), "run": str(Path(run))}))


if __name__ == "__main__":
    main(sys.argv[1])
