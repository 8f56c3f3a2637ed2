"""Opening what a server needs of a store, for those who write it without a model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from semel.serving.writers import ExposureWriter, Writers


@contextlib.contextmanager
def opened_writers(folder: Path, now: Callable[[], int], compact_rows: int = 0) -> Iterator[Writers]:
    """The writers of the store in ``folder`` and of its catalogue. Raises FileNotFoundError, StoreLocked."""
    from semel.examples.logs import ExposureLog
    from semel.history import HistoryStore

    if not folder.exists():
        raise FileNotFoundError(f"no store at {folder}; make one with `semel ingest`")
    with contextlib.ExitStack() as opened:
        store = opened.enter_context(HistoryStore.open(folder, mode="a"))
        catalogue = None
        if (folder / "catalogue").exists():
            catalogue = opened.enter_context(HistoryStore.open(folder / "catalogue", mode="a"))
        writers = Writers(store, catalogue, None, ExposureWriter(ExposureLog(folder / "exposures")), now,
                          compact_rows)
        opened.callback(writers.close)
        yield writers
