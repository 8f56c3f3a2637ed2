"""Bad input becomes one line on stderr and exit code 2, for every verb, here and nowhere else."""

from __future__ import annotations

import difflib
import re
import signal
import sys
import traceback
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperGroup

BAD_INPUT = 2
INTERRUPTED = 128 + signal.SIGINT


class Verbs(TyperGroup):
    """The group of all verbs. Ends the process with 0, 1 (a bug: with its traceback), 2 (bad input) or 130 (Ctrl-C)."""

    FOLDERS_ONLY = ("ingest", "train", "evaluate", "serve", "replay", "skew", "report", "demo", "info")

    def main(self, *args: Any, **kwargs: Any) -> Any:
        standalone = kwargs.pop("standalone_mode", True)
        try:
            words = list(args[0] if args and args[0] is not None else kwargs.get("args") or sys.argv[1:])
            refuse_buckets(words, self.FOLDERS_ONLY)
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:  # `semel info | head -1`
            sys.stdout = sys.stderr = None  # nobody is left to flush to
            code = 1
        except Exception as error:
            line = line_of(error)
            if line is None:
                raise
            print(f"error: {line}", file=sys.stderr)
            code = BAD_INPUT
        if standalone:
            sys.exit(code if isinstance(code, int) else 0)
        return code

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            if ctx.meta.get("traceback") and not hasattr(error, "format_message") and line_of(error) is not None:
                traceback.print_exc()
            raise


def refuse_buckets(words: list[str], folders_only: tuple[str, ...]) -> None:
    """Some verbs write beside the store, which a bucket cannot take: ValueError, before a path is made of a URL."""
    verb = next((word for word in words if not word.startswith("-")), "")
    looked_at = words if verb in folders_only else words[-1:] if verb == "export" else []
    for before, word in pairwise(["", *looked_at]):
        if before == "--memory" or word.startswith(("--memory=", "memory.url=")):
            continue  # item rows travel through buckets
        if re.match(r"(s3a?|gs|az|abfss?|adl|r2|memory)://", word.partition("=")[2] or word):
            raise ValueError(f"{word}: {verb} writes to folders only; a store in a bucket is made and appended to from "
                             "Python (docs/object-storage.md)")


def line_of(error: BaseException) -> str | None:
    """What to tell the user about an error that the input caused, as one line; None if it is not the input's fault."""
    if hasattr(error, "format_message"):  # what the argument parser raises
        message = error.format_message()
        usage = getattr(error, "ctx", None)
        command = usage.command_path if usage is not None else "semel"
        return f"{_one_line(message)} (see {command} --help)"
    if isinstance(error, KeyError) and error.args:
        return _one_line(str(error.args[0]))
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return _one_line(f"{where}{error.strerror}")
    if isinstance(error, (ValueError, OSError, KeyError, _store_error(), *_memory_errors())):
        return _one_line(str(error)) or type(error).__name__
    return None


def _store_error() -> type[BaseException]:
    history = sys.modules.get("semel.history")  # a store that was never imported raised nothing
    return getattr(history, "StoreError", KeyError)


def _memory_errors() -> tuple[type[BaseException], ...]:
    """What another trainer's publishing, or a log of deltas with a hole, raises."""
    memory = sys.modules.get("semel.memory.subscriber")
    return (memory.DeltaGap, sys.modules["semel.memory.publisher"].Fenced) if memory is not None else ()


def _one_line(text: str) -> str:
    return " ".join(text.split())


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name that is none of ``known``: it names the nearest one, or all of them."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(known)}"
    return ValueError(f"unknown {kind} {name!r}; {hint}")
