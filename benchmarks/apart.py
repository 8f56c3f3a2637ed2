"""Parts of a long benchmark, each in a process of its own with a time limit, and a file that is whole after each.

A part that takes too long, or whose process dies, costs itself only; what it had said until then is kept.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def run_apart(function: Callable[..., None], arguments: tuple[Any, ...], limit: float,
              seen: Callable[[Any], None]) -> str | None:
    """``function(say, *arguments)`` in a new process; what it says (``say(plain data)``) is handed to ``seen`` here.

    Returns None when it ended by itself, else why it did not: ``limit`` seconds were over, or how its process ended.
    """
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_said, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    end = time.monotonic() + limit
    try:
        while mine.poll(max(end - time.monotonic(), 0)):
            said = mine.recv()
            if said is None:
                return None
            seen(*said)
        return f"stopped after {limit:g} s"
    except EOFError:
        process.join()
        return f"its process ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join()
        mine.close()


def _said(pipe: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    function(lambda value: pipe.send((value,)), *arguments)
    pipe.send(None)


def write_whole(path: Path, document: Any) -> None:
    """JSON in place of what was there; a reader never finds half of it."""
    aside = path.with_name(path.name + ".partial")
    aside.write_text(json.dumps(document))
    os.replace(aside, path)
