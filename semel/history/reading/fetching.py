"""What a read will touch of a generation on object storage, fetched before the kernels run: the shards and columns
together, so that a batch waits for a few round trips and not for one an object.

``histories`` knows nothing of this. It gets a view whose generation holds, as mapped files, the rows that it may look
at; a column that is not planned for here is fetched whole when it is first asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from semel.batch import JaggedTable, Pointers
from semel.history.generation.generation import Generation, Rows
from semel.history.generation.lookup import TIME_STEP
from semel.history.kernels import cutting, kernel
from semel.history.kernels.sharding import packed, shards_of
from semel.history.log.tail import Tail
from semel.history.reading import histories, parallel
from semel.history.schema import EventSchema, Projection
from semel.history.storage.block_cache import NotHere, ReadFiles
from semel.history.storage.objects import CONNECTIONS
from semel.history.view.following import View

_NO_LIMIT = 1 << 62

check_projection = histories.check_projection


def read(view: View, schema: EventSchema, pointers: Pointers, projection: Projection) -> JaggedTable:
    """``histories.read`` of any view. Raises GenerationGone where the generation was removed meanwhile."""
    generation = view.generation.for_read()
    if generation is not None:
        view = replace(view, generation=generation)
        users = _fetch_tests(view, pointers, projection)
        if users is not None and projection.columns:
            _fetch_chosen(users, histories.select(view, schema, pointers, projection), projection.columns)
            # what that has looked at may have been let go of since, and mapped anew
            generation.lookup = generation.lookup.for_read(generation)
    return histories.read(view, schema, pointers, projection)


def count(view: View, schema: EventSchema, pointers: Pointers, projection: Projection) -> np.ndarray:
    """``histories.count`` of any view. Raises GenerationGone."""
    generation = view.generation.for_read()
    if generation is not None:
        view = replace(view, generation=generation)
        _fetch_tests(view, pointers, projection)
    return histories.count(view, schema, pointers, projection)


def count_users(view: View) -> int:
    """How many ``histories.keys`` there are: those of the generation are known, those of the log are looked up."""
    if view.deletions or view.compacted > view.version:
        return len(histories.keys(view))
    users, kept = view.tail.users(view.version), sum(view.generation.info["users"])
    if not len(users) or not kept:
        return kept + len(users)
    schema = view.generation.schema
    pointers = Pointers(users, np.array(np.iinfo(np.int64).max), np.array(view.version))
    there = count(replace(view, tail=Tail.empty(schema)), schema, pointers, Projection((), last=1))
    return kept + int(np.count_nonzero(there == 0))


class _Users:
    """Whose events the pointers name. ``shards``: those with rows that some name; for each ``indexes``: its pointers
    whose user it has; ``begin`` and ``end`` [P]: the user's rows; ``plain`` [P]: whether all are of versions that
    the pointer sees; ``low`` and ``high`` [P]: the rows among which the first one not before ``as_of`` lies, none where
    all of the user's are before it."""

    def __init__(self, generation: Generation, pointers: Pointers) -> None:
        assert isinstance(generation.files, ReadFiles)
        self._files = generation.files
        strings = generation.schema.string_keys
        encoded = [text.encode() for text in pointers.user_id] if strings else []
        of = shards_of(encoded if strings else np.ascontiguousarray(pointers.user_id), len(generation.shards))
        named = [generation.shards[i] for i in np.unique(of).tolist()]
        self.shards = [shard for shard in named if shard.rows]
        lookup = generation.lookup
        files = ("users", "offsets", "first", "last", "last_time", "time_index")
        self._at_once([partial(getattr, generation.shards[shard], name) for shard in lookup.missing(of)
                       for name in (files[1:] if strings else files)])
        if strings:
            self._at_once([partial(getattr, shard, "user_strings") for shard in self.shards])
        lookup.need(of)
        self.indexes: list[np.ndarray] = []
        self.begin, self.end, self.low, self.high = np.zeros((4, len(pointers)), np.int64)
        self.plain = np.ones(len(pointers), bool)
        for shard in self.shards:
            index = np.flatnonzero(of == shard.index)
            records = lookup.records[lookup.first_user[shard.index] : lookup.first_user[shard.index + 1]]
            if strings:
                user = np.empty(len(index), np.int64)
                keys = packed([encoded[i] for i in index.tolist()])
                cutting.find_strings(*shard.user_strings, *keys, np.arange(len(index)), user)
                index, user = index[user >= 0], user[user >= 0]
            else:
                users = records[:, cutting.KEY]
                user = np.minimum(np.searchsorted(users, pointers.user_id[index]), shard.user_count - 1)
                here = users[user] == pointers.user_id[index]
                index, user = index[here], user[here]
            record = records[user]
            self.begin[index], self.end[index] = record[:, cutting.FIRST_ROW], record[:, cutting.END_ROW]
            self.plain[index] = record[:, cutting.LAST_VERSION] <= pointers.version[index]
            steps = lookup.time_index[lookup.first_step[shard.index] : lookup.first_step[shard.index + 1]]
            _narrow(steps, TIME_STEP, index, record[:, cutting.LAST_TIME], pointers.as_of, self.begin, self.end,
                    self.low, self.high)
            self.indexes.append(index)

    def fetch(self, rows: Sequence[Rows], columns: Sequence[str]) -> None:
        """Have these rows of each shard here."""
        self._at_once([partial(shard.fetch, name, ranges) for shard, ranges in zip(self.shards, rows, strict=True)
                       for name in columns])

    def _at_once(self, fetches: Sequence[partial[object]]) -> None:
        """What is here at once, the rest from many objects at a time. Raises what the first failing one raised."""
        waiting = []
        self._files.offline = True
        for fetch in fetches:
            try:
                fetch()
            except NotHere:
                waiting.append(fetch)
        self._files.offline = False
        parallel.run([(fetch, ()) for fetch in waiting], CONNECTIONS)


def _fetch_tests(view: View, pointers: Pointers, projection: Projection) -> _Users | None:
    """Fetch what ``histories.select`` looks at: times about the cut, all before it where ``since`` is searched;
    versions and groups of the user's events up to the cut where they are tested. None where that cannot be said before,
    so that columns must be fetched whole."""
    if view.deletions and view.deletions.marks.has(pointers.user_id).any():
        return None
    users = _Users(view.generation, pointers)
    tested = ~users.plain | (projection.groups is not None)
    begin = users.begin if projection.since is not None else users.low
    if view.tail.rows:  # merged by time with the rows before the cut, of which ``last`` are enough where all are taken
        most = _NO_LIMIT if projection.last is None else projection.last
        begin = np.where(tested, users.begin, np.minimum(begin, np.maximum(users.begin, users.low - most)))
    users.fetch([(begin[index], users.high[index]) for index in users.indexes], ["event_time"])
    if tested.any() or view.tail.rows:
        group = view.generation.schema.group
        some = [index[tested[index]] for index in users.indexes]
        users.fetch([(users.begin[index], users.high[index]) for index in some],
                    ["version"] if projection.groups is None or group is None else ["version", group])
    return users


def _fetch_chosen(users: _Users, chosen: histories.Selection, columns: Sequence[str]) -> None:
    room = chosen.room if len(chosen.room) else np.zeros(len(chosen.count) + 1, np.int64)
    users.fetch([_rows_of(index, chosen.begin, chosen.count, room, chosen.refs) for index in users.indexes], columns)


def _rows_of(index: np.ndarray, begin: np.ndarray, count: np.ndarray, room: np.ndarray, refs: np.ndarray) -> Rows:
    """The shard's rows that a selection names: ranges, and single ones by reference."""
    named = room[index + 1] > room[index]
    ranges, lists = index[~named], index[named]
    size = count[lists]
    places = np.repeat(begin[lists] - np.cumsum(size) + size, size) + np.arange(size.sum())
    rows = refs[places] if len(places) else places
    rows = rows[rows >= 0]
    return (np.concatenate([begin[ranges], rows]), np.concatenate([begin[ranges] + count[ranges], rows + 1]))


@kernel
def _narrow(steps, step, index, last_time, as_of, begin, end, low, high):
    # The same search as in ``cutting.cut``: the block of ``step`` rows in which a history is cut.
    for i in range(len(index)):
        p = index[i]
        low[p] = end[p]
        high[p] = end[p]
        if last_time[i] < as_of[p]:
            continue
        first, after = begin[p] // step + 1, (end[p] - 1) // step + 1
        while first < after:
            middle = (first + after) >> 1
            if steps[middle] < as_of[p]:
                first = middle + 1
            else:
                after = middle
        low[p] = max(begin[p], (first - 1) * step)
        high[p] = min(end[p], first * step)
