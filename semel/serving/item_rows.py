"""Rows of an item memory in a batch that is to be scored: live, from a log of deltas that is followed, or as they were
when a request was served."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from semel.batch import RequestBatch
    from semel.memory import DeltaSubscriber, ItemMemory

POLL_S = 0.25


def subscribe(artifact: Any, run: Path, url: str | Path | None = None) -> DeltaSubscriber | None:
    """For the model of ``run``, if it has a memory, its rows at ``url`` (None: ``run / "memory"``), followed from now
    on; None for another model. Raises ValueError for a log that does not fit the model or that cannot be read now, and
    for a ``url`` that a model without a memory would never read, or at which lies something else; FileNotFoundError
    for a folder that is not there. A log that nobody has begun yet is waited for."""
    from semel.memory import CorruptDelta, DeltaGap, DeltaSubscriber
    from semel.models.early_ranker import memory_layer

    check_memory(artifact, run, url)
    if memory_layer(artifact.model) is None:
        return None
    told, url = url is not None, run / "memory" if url is None else url
    rows = DeltaSubscriber(url)
    try:
        rows.poll()
    except (CorruptDelta, DeltaGap) as error:
        raise ValueError(f"the item memory at {url} cannot be read: {error}") from None
    if told and rows.memory is None:
        _check_unbegun(rows)
    check_width(artifact, rows)
    return rows.start(POLL_S)


def check_memory(artifact: Any, run: Path, url: str | Path | None) -> None:
    """ValueError for a ``url`` (None: not told) that a model without a memory would never read."""
    from semel.models.early_ranker import memory_layer

    if url is not None and memory_layer(artifact.model) is None:
        raise ValueError(f"memory {url}: model {artifact.version} of {run} has no item memory and would read nothing "
                         "there; leave it out, or name a run that has one (the recipes ..._memory train such)")


def _check_unbegun(rows: DeltaSubscriber) -> None:
    """Raises where ``rows``, whose log nobody has begun, can hardly have been meant."""
    from semel.memory.sink import FolderSink

    url, remedy = rows.sink.url, "name what training publishes to (memory.url of its recipe, by default RUN/memory)"
    if isinstance(rows.sink, FolderSink) and not rows.sink.path.is_dir():
        raise FileNotFoundError(f"memory {url}: there is no such folder; {remedy}")
    names = rows.sink.names()
    if names and not any(name.endswith("/epoch.json") for name in names):
        raise ValueError(f"memory {url}: {names[0]} lies there, which is of no log of deltas; {remedy}")


def first_model(url: str | Path, run: Path) -> None:
    """Into ``run``, which has no model, the weights that the log at ``url`` has, if any. Raises ValueError for a log
    that cannot be read."""
    from semel.memory import CorruptDelta, DeltaGap, DeltaSubscriber
    from semel.serving.versions import take

    rows = DeltaSubscriber(url)
    try:
        rows.poll()
        take(rows, run)
    except (CorruptDelta, DeltaGap) as error:
        raise ValueError(f"the weights at {url} cannot be read: {error}") from None


def check_width(artifact: Any, rows: DeltaSubscriber) -> None:
    """Raises ValueError where rows of another width than the model's are published."""
    from semel.models.early_ranker import memory_layer

    layer, memory = memory_layer(artifact.model), rows.memory
    if layer is not None and memory is not None and memory.dim != layer.memory.dim:
        raise ValueError(f"the item memory at {rows.sink.url} has rows of {memory.dim} numbers, model "
                         f"{artifact.version} reads {layer.memory.dim}; name the log that its training writes")


def joined(batch: RequestBatch, artifact: Any, memory: ItemMemory | None) -> tuple[RequestBatch, Tensor, Tensor]:
    """``batch`` with rows of ``memory`` (None: misses only), where the model reads any; hit [C] bool, and when each row
    was written [C] (microseconds since 1970, 0 without one)."""
    import torch

    from semel.models.early_ranker import HIT, ROW, memory_layer

    item = batch.candidate["item_id"]
    layer = memory_layer(artifact.model)
    if layer is None:
        return batch, torch.zeros_like(item, dtype=torch.bool), torch.zeros_like(item)
    if memory is None:
        row, hit = torch.zeros(len(item), layer.memory.dim), torch.zeros(len(item), dtype=torch.bool)
        written = torch.zeros_like(item)
    else:
        row, hit, age = memory.read(item, now=0)
        written = torch.where(hit, -age, 0)
    return replace(batch, candidate={**batch.candidate, ROW: row, HIT: hit}), hit, written
