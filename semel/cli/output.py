"""What the verbs print: progress and remarks on stderr, results on stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
    from rich.table import Table


def remarks() -> Console:
    """The console for progress and remarks (stderr)."""
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def results() -> Console:
    """The console for results (stdout)."""
    from rich.console import Console

    return Console(highlight=False)


def remark(text: str) -> None:
    """One line on stderr, dim, word by word as given: square brackets are not markup."""
    remarks().print(text, style="dim", markup=False, soft_wrap=True)


def print_json(document: Mapping[str, Any]) -> None:
    """One JSON document on stdout: numpy numbers become numbers, NaN and infinities null."""
    print(json.dumps(plain(document), indent=2, ensure_ascii=False, allow_nan=False))


def plain(value: Any) -> Any:
    """``value`` in the types that JSON has."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, tensors
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def table(title: str | None, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table whose first column is text and whose others are numbers, aligned right."""
    from rich import box
    from rich.table import Table

    out = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for index, column in enumerate(columns):
        out.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    for row in rows:
        out.add_row(*row)
    return out


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A progress display on stderr that vanishes when it is done. Nothing is drawn where stderr is no terminal."""
    from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

    console = remarks()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(),
               TextColumn("{task.fields[detail]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        yield bar


class Steps:
    """Shows ``progress(what, done, total)`` calls in a progress display: one line a ``what``, with its rate."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(what, total=total, detail="")
        task = self._tasks[what]
        speed = self._bar.tasks[self._bar.task_ids.index(task)].speed
        self._bar.update(task, completed=done, total=total, detail=f"{count(speed)}/s" if speed else "")

    def clear(self) -> None:
        """Take all lines away."""
        for task in self._tasks.values():
            self._bar.remove_task(task)
        self._tasks.clear()


def size(number_of_bytes: float) -> str:
    """Bytes for a person: 1.2 kB, 34 MB (powers of ten)."""
    value = float(number_of_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if value >= 100 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def count(number: float, of: str = "") -> str:
    """"1,234,567", or with what is counted: "1 row", "1,234,567 rows"."""
    return f"{number:,.0f}" + (f" {of}" if of else "") + ("s" if of and number != 1 else "")
