"""Promises 1 and 8, from end to end: what the server read for a request is what training and replay read later.

Requests are served while events go on arriving (late, tied, null), the store is compacted and reopened, items change.
Afterwards every exposure is materialized again, in batches, from its logged pointer alone.
"""

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, JaggedTable, Pointers, RequestRows, ids_array, offsets_of
from semel.examples import (
    ExposureLog,
    OutcomeLog,
    RequestLoader,
    context_columns,
    exposure_rows,
    join,
    materialize,
    rows_from_table,
    rows_to_table,
)
from semel.features import Feature, FeatureSpec, Task
from semel.history import EventSchema, HistoryStore

SPEC = FeatureSpec(
    history=(Feature("item_id"), Feature("rating", "numeric"), Feature("action")),
    request=(Feature("surface"),), candidate=(Feature("genres", "multi"), Feature("year", "numeric")),
    tasks=(Task("like", unobserved=0.0),), history_last=4,
)

users, items, times = st.integers(0, 2), st.integers(0, 4), st.integers(0, 12)
event = st.tuples(users, items, times, st.sampled_from([None, 1.0, 5.0]), st.sampled_from([None, "view", "buy"]))
item = st.tuples(items, times, st.sampled_from([None, "", "war", "war|love"]), st.sampled_from([None, 1990, 2001]))
step = st.one_of(
    st.tuples(st.just("append"), st.lists(event, min_size=1, max_size=5)),
    st.tuples(st.just("items"), st.lists(item, min_size=1, max_size=3)),
    st.tuples(st.just("serve"), st.tuples(users, times, st.lists(items, min_size=1, max_size=4, unique=True))),
    st.tuples(st.just("compact"), st.none()),
    st.tuples(st.just("reopen"), st.none()),
)


class Site:
    """A store, a catalogue and an exposure log, written to as a server would."""

    def __init__(self, folder: Path, text: bool) -> None:
        self.folder, self.kind = folder, pa.string() if text else pa.int64()
        self.id = (lambda n: f"ü {n}") if text else (lambda n: n)
        schemas = {
            "store": EventSchema({"item_id": self.kind, "rating": pa.float32(), "action": pa.string()}, self.kind),
            "catalogue": EventSchema({"genres": pa.string(), "year": pa.int32()}, self.kind, key="item_id"),
        }
        self.handles = {name: HistoryStore.create(folder / name, schema, shards=2) for name, schema in schemas.items()}
        self.log = ExposureLog(folder / "exposures")
        self.served = []

    def append(self, rows):
        self.handles["store"].append(pa.table({
            "user_id": pa.array([self.id(row[0]) for row in rows], self.kind),
            "event_time": pa.array([row[2] for row in rows], pa.int64()),
            "item_id": pa.array([self.id(row[1]) for row in rows], self.kind),
            "rating": pa.array([row[3] for row in rows], pa.float32()),
            "action": pa.array([row[4] for row in rows], pa.string())}))

    def items(self, rows):
        self.handles["catalogue"].append(pa.table({
            "item_id": pa.array([self.id(row[0]) for row in rows], self.kind),
            "event_time": pa.array([row[1] for row in rows], pa.int64()),
            "genres": pa.array([row[2] for row in rows], pa.string()),
            "year": pa.array([row[3] for row in rows], pa.int32())}))

    def serve(self, request):
        user, as_of, candidates = request
        number, context = len(self.served), {"surface": "home"}
        ids = [self.id(c) for c in candidates]
        store, catalogue = self.handles["store"], self.handles["catalogue"]
        rows = RequestRows(
            np.array([f"r{number}"], dtype=object), Pointers([self.id(user)], as_of, store.version),
            np.array([catalogue.version]), context_columns([context], SPEC.request),
            Jagged(ids_array(ids), offsets_of([len(ids)])), {}, {})
        batch = materialize(rows, store, catalogue, SPEC, checksum=True)
        count = len(ids)
        self.log.append(pa.table({
            "request_id": [f"r{number}"], "user_id": pa.array([self.id(user)], self.kind), "as_of": [as_of],
            "version": [store.version], "catalogue_version": [catalogue.version], "context": [json.dumps(context)],
            "candidates": pa.array([ids], pa.list_(self.kind)), "scored": [[True] * count],
            "returned": [[True] * count], "shown": [[True] * count], "scores": [[0.0] * count], "model_version": ["m"],
            "history_checksum": pa.array(batch.request["history_checksum"].numpy().view(np.uint64)),
            "history_length": pa.array(batch.request["history"].lengths.numpy().astype(np.int32)),
            "history_status": pa.array(batch.request["history"].status.numpy()),
            "batch_requests": [1], "batch_candidates": [count], "device": ["cpu"], "path": ["eager"],
            "served_at": [number]}))
        self.served.append(batch)

    def compact(self, _):
        for handle in self.handles.values():
            handle.compact()

    def reopen(self, _):
        self.close()
        self.handles = {name: HistoryStore.open(self.folder / name, "a") for name in self.handles}
        self.log = ExposureLog(self.folder / "exposures")

    def close(self):
        for handle in self.handles.values():
            handle.close()
        self.log.close()


def same(a, b):
    """Bit for bit, NaN included."""
    if isinstance(a, (Jagged, JaggedTable)):
        pairs = [(a.offsets, b.offsets)]
        pairs += [(a.values, b.values)] if isinstance(a, Jagged) else [(a.columns[n], b.columns[n]) for n in a.columns]
        return all(same(one, other) for one, other in pairs)
    return a.dtype == b.dtype and a.numpy().tobytes() == b.numpy().tobytes()


def one_request(batch, row):
    """Everything that the model reads of one request of a batch."""
    part = slice(*batch.candidate_offsets[row : row + 2].tolist())
    found = {"item_id": batch.candidate["item_id"][part], "year": batch.candidate["year"][part],
             "surface": batch.request["surface"][row : row + 1]}
    found |= {f"genres {c}": batch.candidate["genres"][c] for c in range(part.start, part.stop)}
    return list(found.values()) + list(batch.request["history"].row(row).values())


SERVE = ("serve", (0, 9, [0, 1]))
EVENTFUL = [  # each step would change what the requests before it see, if a clock were left out
    ("items", [(0, 3, "war", 1990)]), ("append", [(0, 1, 4, 5.0, "view"), (0, 2, 4, None, None)]), SERVE,
    ("append", [(0, 3, 4, 1.0, "buy"), (0, 4, 9, 1.0, "buy")]), ("items", [(0, 3, "war|love", None), (1, 9, "", 2001)]),
    SERVE, ("compact", None), ("append", [(0, 0, 8, 1.0, "late")]), ("reopen", None), ("items", [(0, 8, None, 2001)]),
    SERVE, ("serve", (2, 9, [3])), ("append", [(2, 0, 0, 1.0, None)]),
]


@example(steps=EVENTFUL, text=False, size=2)
@example(steps=EVENTFUL, text=True, size=3)
@settings(max_examples=20, deadline=None)
@given(steps=st.lists(step, min_size=2, max_size=14), text=st.booleans(), size=st.integers(1, 4))
def test_every_exposure_is_materialized_again_as_it_was_served(steps, text, size):
    with tempfile.TemporaryDirectory() as folder:
        site = Site(Path(folder), text)
        try:
            late = [("append", [(0, 0, 8, 5.0, "late"), (0, 1, 0, None, None)]), ("items", [(0, 0, "late", 1900)])]
            for name, argument in [*steps, SERVE, *late, ("compact", None)]:
                getattr(site, name)(argument)
            exposures = site.log.read()
            assert exposures["request_id"].to_pylist() == [f"r{n}" for n in range(len(site.served))]

            reader = {name: HistoryStore.open(site.folder / name) for name in site.handles}
            replayed = exposure_rows(exposures, SPEC.request)
            nothing = OutcomeLog(site.folder / "outcomes").read()
            labelled = join(exposures, nothing, 10, SPEC.tasks, 1000, SPEC.request).rows
            for rows in (replayed, rows_from_table(rows_to_table(labelled))):
                again = materialize(rows, reader["store"], reader["catalogue"], SPEC, checksum=True)
                logged = exposures["history_checksum"].to_numpy()
                assert (again.request["history_checksum"].numpy().view(np.uint64) == logged).all()
                assert again.request["history"].lengths.tolist() == exposures["history_length"].to_pylist()
                loader = RequestLoader(rows, reader["store"], features=SPEC, catalogue=reader["catalogue"],
                                       batch_requests=size, seed=len(steps))
                seen = 0
                for batch in loader:
                    for row, request in enumerate(batch.request_id):
                        served = one_request(site.served[int(request[1:])], 0)
                        trained = one_request(batch, row)
                        assert len(served) == len(trained) and all(map(same, served, trained)), request
                        seen += 1
                assert seen == len(site.served)
            for handle in reader.values():
                handle.close()
            assert torch.equal(batch.label_mask["like"], torch.ones(batch.candidates, dtype=torch.bool))
        finally:
            site.close()
