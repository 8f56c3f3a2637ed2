"""Exposures of the server: what one request was, saw and got, and the thread that writes them down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    from semel.memory import Position


@dataclass(frozen=True)
class Exposure:
    """One served request. ``candidates`` [C], ``ranked_by`` [C] float32, ``task_scores`` [C, tasks] float32,
    ``order``: candidate rows best first, of which ``returned`` were sent. ``memory``: the position of the memory that
    rows were read from, None without one."""

    request_id: str
    user_id: int | str
    as_of: int
    version: int
    catalogue_version: int
    context: dict[str, Any]
    candidates: np.ndarray
    ranked_by: np.ndarray
    task_scores: np.ndarray
    order: np.ndarray
    returned: int
    model_version: str
    checksum: int
    history_length: int
    history_status: int
    path: str
    device: str
    served_at: int
    batch: Membership
    memory: Position | None = None
    stage: str = "rank"
    part_of: str | None = None


@dataclass(frozen=True)
class Membership:
    """Where in which scored batch a request was: a replay scores it there again."""

    batch_id: str
    index: int
    requests: int
    candidates: int


def exposures_table(exposures: Sequence[Exposure], schema: pa.Schema) -> pa.Table:
    """``exposures`` as rows of ``schema`` (``semel.examples.exposure_schema``). What was shown is not known here:
    clients report it as an outcome."""
    counts = np.array([len(exposure.candidates) for exposure in exposures], dtype=np.int64)
    position, returned = [], []
    for exposure in exposures:
        place = np.empty(len(exposure.candidates), dtype=np.int32)
        place[exposure.order] = np.arange(len(place), dtype=np.int32)
        sent = place < exposure.returned
        position.append(pa.array(place, mask=~sent))
        returned.append(sent)
    by_candidate = _lists(counts)
    values: dict[str, Any] = {
        "request_id": [e.request_id for e in exposures], "user_id": [e.user_id for e in exposures],
        "as_of": [e.as_of for e in exposures], "version": [e.version for e in exposures],
        "catalogue_version": [e.catalogue_version for e in exposures],
        "surface": [e.context["surface"] if isinstance(e.context.get("surface"), str) else None for e in exposures],
        "context": [json.dumps(e.context, separators=(",", ":")) for e in exposures],
        "candidates": by_candidate(pa.concat_arrays(
            [pa.array(e.candidates, schema.field("candidates").type.value_type) for e in exposures])),
        "scored": by_candidate(pa.array(np.ones(counts.sum(), dtype=bool))),
        "returned": by_candidate(pa.array(np.concatenate(returned))),
        "position": by_candidate(pa.concat_arrays(position)),
        "scores": by_candidate(pa.array(np.concatenate([e.ranked_by for e in exposures]))),
        "task_scores": _lists(np.array([e.task_scores.size for e in exposures]))(
            pa.array(np.concatenate([e.task_scores.reshape(-1) for e in exposures]))),
        "model_version": [e.model_version for e in exposures],
        "memory": [None if e.memory is None else
                   [{"epoch": e.memory.epoch, "shard": shard, "sequence": e.memory.sequence}
                    for shard in range(e.memory.shards)] for e in exposures],
        "history_checksum": np.array([e.checksum for e in exposures], dtype=np.uint64),
        "history_length": [e.history_length for e in exposures],
        "history_status": [e.history_status for e in exposures],
        "batch_id": [e.batch.batch_id for e in exposures], "batch_index": [e.batch.index for e in exposures],
        "batch_requests": [e.batch.requests for e in exposures],
        "batch_candidates": [e.batch.candidates for e in exposures],
        "device": [e.device for e in exposures], "path": [e.path for e in exposures],
        "served_at": [e.served_at for e in exposures],
        "stage": [e.stage for e in exposures], "part_of": [e.part_of for e in exposures],
    }
    columns = []
    for field in schema:
        value = values.get(field.name)
        if value is None:
            columns.append(pa.nulls(len(exposures), field.type))
        elif isinstance(value, pa.Array):
            columns.append(value.cast(field.type))
        else:
            columns.append(pa.array(value, field.type))
    return pa.Table.from_arrays(columns, schema=schema)


def _lists(counts: np.ndarray) -> Any:
    offsets = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=offsets[1:])
    return lambda values: pa.ListArray.from_arrays(pa.array(offsets), values)
