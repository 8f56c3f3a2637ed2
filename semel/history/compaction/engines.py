"""What carries a compaction out: threads of this process within a memory limit, or Ray. Both write the same bytes."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Literal, get_args

from semel.history.compaction.partition import Partition, check_fits
from semel.history.compaction.shards import Change, compact_shard
from semel.history.generation.generation import Codec, Shard, WrittenShard, finish_generation
from semel.history.log.tail import erased
from semel.history.view.following import View

Engine = Literal["local", "ray"]
ENGINES = get_args(Engine)
SERIAL_ROWS = 1 << 16
"""Fewer rows are written before a second thread has begun."""

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", re.IGNORECASE)


def write_generation(folder: Path, view: View, tokens: dict[str, int], codec: Codec, engine: Engine, workers: int,
                     memory_limit: int, change: Change, progress: Callable[[int, int], None] | None = None) -> int:
    """Write the view's generation + tail, with ``change``, as a new generation into ``folder``, which is made; its
    seal."""
    folder.mkdir(parents=True)
    if engine == "ray":
        from semel.history.compaction.ray_engine import write_shards
    else:
        write_shards = write_shards_here
    written: list[WrittenShard] = []
    for shard in write_shards(folder, view, codec, workers, memory_limit, change):
        written.append(shard)
        if progress is not None:
            progress(len(written), len(view.generation.shards))
    dictionaries = {name: [value.encode() for value in view.dictionaries.array(name)]
                    for name in view.dictionaries.names}
    scrubbing, schema = change.scrubbing, view.generation.schema
    if len(scrubbing.forget):  # a string that only erased events had goes with them
        for name, words in dictionaries.items():
            used = {code for shard in written for code in shard.codes.get(name, ())}
            dictionaries[name] = [word if code in used else erased(code).encode() for code, word in enumerate(words)]
    if change.added is not None:
        schema = schema.with_column(change.added.column.name, change.added.column.type, 0)
        if change.added.column.is_dictionary:
            dictionaries[change.added.column.name] = [word.encode() for word in change.added.words]
    marks = scrubbing.marks(view.generation, [shard.expired for shard in written])
    return finish_generation(folder, schema, codec, written, dictionaries, tokens, marks)


def write_shards_here(folder: Path, view: View, codec: Codec, workers: int, limit: int, change: Change,
                      ) -> Iterator[WrittenShard]:
    """One pass over the log, which splits it by shard; then shard by shard, as many at a time as there are workers
    and as memory holds."""
    old, schema, tail = view.generation, view.generation.schema, view.tail
    with Partition(folder, schema, len(old.shards), tail.rows, limit, workers) as partition:
        for place in tail.ranges:
            for batch, versions in place.read():
                partition.add(batch, versions)
        new = partition.shards()
        free = limit - partition.nbytes
        # A ``Shard`` of its own each time: mapped files are let go of when it is done.
        also = change.row_bytes(schema)
        jobs = [(check_fits(Shard(old, rows.shard), rows, free, also),
                 lambda rows=rows: compact_shard(folder, schema, codec, Shard(old, rows.shard), rows, change))
                for rows in new]
        if workers == 1 or tail.rows + old.rows < SERIAL_ROWS:
            for _, job in jobs:
                yield job()
        else:
            yield from _in_threads(jobs, workers, free)


def _in_threads(jobs: Sequence[tuple[int, Callable[[], Any]]], workers: int, free: int) -> Iterator[Any]:
    """The jobs' results as they come: ``workers`` at a time, each of which takes its part of ``free`` meanwhile."""
    waiting = deque(jobs)
    running: dict[Future[Any], int] = {}
    with ThreadPoolExecutor(workers, "semel-compact") as pool:
        while waiting or running:
            while waiting and len(running) < workers and waiting[0][0] <= free:
                need, job = waiting.popleft()
                free -= need
                running[pool.submit(job)] = need
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                free += running.pop(done)
                yield done.result()


def memory_bytes(limit: int | str) -> int:
    """A memory limit in bytes. Raises ValueError for what is no size."""
    if isinstance(limit, str):
        match = _SIZE.fullmatch(limit.strip())
        if match is not None:
            number, prefix, binary = match.groups()
            limit = int(float(number) * (1024 if binary else 1000) ** " kmgt".index(prefix.lower() or " "))
    if isinstance(limit, bool) or not isinstance(limit, int) or limit < 1:
        raise ValueError(f'memory_limit {limit!r} is not a size: give bytes as an integer, or text such as "512MiB" or '
                         '"1GiB"')
    return limit


def check_engine(engine: str, workers: int) -> None:
    """Raises ValueError for an engine that is not known or not installed, or a bad number of workers."""
    if engine not in ENGINES:
        raise ValueError(f"engine {engine!r} is none of {', '.join(ENGINES)}")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers!r}")
    if engine == "ray":
        try:
            import ray.data  # noqa: F401
        except ImportError:
            raise ValueError('engine "ray" needs Ray: pip install "semel[ray]"') from None
