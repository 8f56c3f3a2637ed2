import csv
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semel.examples import Label, build_examples, open_examples, sessions, time_split
from semel.examples.splits import time_boundaries
from semel.features import Feature, FeatureSpec, Task
from semel.history import EventSchema, HistoryStore

SPEC = FeatureSpec(request=(Feature("age"), Feature("height", "numeric")),
                   tasks=(Task("like"), Task("rating", "regression")))
S = 1_000_000


def make_store(path, kind, users=12, events=400, seed=0):
    rng = np.random.default_rng(seed)
    name = (lambda n: f"ü{n:02d}") if kind == pa.string() else (lambda n: n)
    table = pa.table({
        "user_id": pa.array([name(int(u)) for u in rng.integers(0, users, events)], kind),
        "event_time": rng.integers(0, 100_000, events) * S,
        "item_id": pa.array([name(int(i)) for i in rng.integers(0, 30, events)], kind),
        "rating": pa.array(rng.integers(1, 6, events), pa.float32())})
    with HistoryStore.create(path, EventSchema({"item_id": kind, "rating": pa.float32()}, user_id=kind)) as store:
        for begin in range(0, events, 150):
            store.append(table.slice(begin, 150))
        store.compact()
    pq.write_table(pa.table({
        "user_id": pa.array([name(u) for u in range(users - 1)], kind),
        "age": pa.array([str(20 + u) for u in range(users - 1)]),
        "height": pa.array([None, *range(1, users - 1)], pa.int32())}), path / "users.parquet")
    return table, name


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()], ids=["integer ids", "string ids"])
def test_a_set_holds_the_sessions_of_the_store_split_by_time(tmp_path, kind):
    table, name = make_store(tmp_path / "store", kind)
    found = build_examples(tmp_path / "store", "default", SPEC)
    parts = {split: found.rows(split) for split in ("train", "validation", "test")}
    expected = sessions(table, version=3)
    ids = [i for rows in parts.values() for i in rows.request_id]
    assert sorted(ids) == sorted(expected.request_id) and len(set(ids)) == len(ids)
    assert found.counts == {split: {"requests": len(rows), "candidates": len(rows.candidates.values)}
                            for split, rows in parts.items()}
    begins, test_begins = found.boundaries["validation"], found.boundaries["test"]
    assert parts["train"].pointers.as_of.max() < begins <= parts["validation"].pointers.as_of.min()
    assert parts["validation"].pointers.as_of.max() < test_begins <= parts["test"].pointers.as_of.min()
    times = np.asarray(table["event_time"])
    assert abs((times >= test_begins).mean() - 0.1) < 0.01 and abs((times >= begins).mean() - 0.2) < 0.01

    place = {request: row for row, request in enumerate(expected.request_id)}
    for rows in parts.values():
        assert (rows.pointers.version == 3).all() and (rows.catalogue_version == 0).all()
        same = expected.select(np.array([place[request] for request in rows.request_id], dtype=np.int64))
        assert rows.candidates.values.tolist() == same.candidates.values.tolist()
        assert rows.label["like"].tolist() == same.label["like"].tolist()
        for user, age, height in zip(rows.pointers.user_id, rows.context["age"], rows.context["height"], strict=True):
            number = next(u for u in range(12) if name(u) == user)
            assert age == (str(20 + number) if number < 11 else None)  # user 11 is not in the table
            assert np.isnan(height) if number in (0, 11) else height == number


def test_a_set_made_the_same_way_is_reused_and_else_built_anew(tmp_path):
    make_store(tmp_path / "store", pa.int64())
    first = build_examples(tmp_path / "store", "default", SPEC)
    assert not first.reused and build_examples(tmp_path / "store", "default", SPEC).reused
    longer_history = FeatureSpec(request=SPEC.request, tasks=SPEC.tasks, history_last=7)  # rows hold but pointers
    assert build_examples(tmp_path / "store", "default", longer_history).reused
    assert not build_examples(tmp_path / "store", "default", SPEC, like_threshold=3.0).reused
    assert not build_examples(tmp_path / "store", "default", SPEC, max_candidates=1).reused
    opened = open_examples(tmp_path / "store", "default")
    assert opened.counts["train"]["requests"] == opened.counts["train"]["candidates"]
    with HistoryStore.open(tmp_path / "store", "a") as store:
        store.append(pa.table({"user_id": [1], "event_time": [5], "item_id": [1],
                               "rating": pa.array([5.0], pa.float32())}))
    again = build_examples(tmp_path / "store", "default", SPEC, max_candidates=1)
    assert not again.reused and again.meta["version"] == 4
    assert not list((tmp_path / "store" / "examples" / "default").glob(".*"))


def test_dates_may_decide_the_split(tmp_path):
    make_store(tmp_path / "store", pa.int64())
    found = build_examples(tmp_path / "store", "dates", SPEC, validation_from=50_000 * S, test_from=90_000 * S)
    assert found.rows("train").pointers.as_of.max() < 50_000 * S <= found.rows("validation").pointers.as_of.min()
    with pytest.raises(ValueError, match="before validation"):
        build_examples(tmp_path / "store", "dates", SPEC, validation_from=50, test_from=9)
    with pytest.raises(ValueError, match="both"):
        build_examples(tmp_path / "store", "dates", SPEC, test_from=9)


def test_what_a_store_lacks_is_named(tmp_path):
    make_store(tmp_path / "store", pa.int64())

    def refuses(pattern, error=ValueError, name="x", spec=SPEC, **options):
        with pytest.raises(error, match=pattern):
            build_examples(tmp_path / "store", name, spec, **options)

    refuses("no column 'click'", spec=FeatureSpec(tasks=(Task("click"),)))
    refuses("'city' is not a column of .*users.parquet", spec=FeatureSpec(request=(Feature("city"),)))
    refuses("name may hold", name="../x")
    refuses("leave something to train on", test_fraction=0.95)
    with pytest.raises(FileNotFoundError, match="no example set"):
        open_examples(tmp_path / "store", "none")
    (tmp_path / "store" / "users.parquet").unlink()
    refuses("users.parquet, which does not exist")
    build_examples(tmp_path / "store", "bought", FeatureSpec(tasks=(Task("bought"),)), labels=[Label("bought")])
    HistoryStore.create(tmp_path / "empty", EventSchema({"item_id": pa.int64(), "rating": pa.float32()})).close()
    with pytest.raises(ValueError, match="no events"):
        build_examples(tmp_path / "empty", "x", FeatureSpec())


def test_a_set_in_an_unknown_format_is_refused_and_a_half_written_one_built_anew(tmp_path):
    make_store(tmp_path / "store", pa.int64())
    build_examples(tmp_path / "store", "x", SPEC)
    meta = tmp_path / "store" / "examples" / "x" / "meta.json"
    good = meta.read_text()
    meta.write_text(json.dumps(json.loads(good) | {"format_version": 9}))
    with pytest.raises(ValueError, match="format 9"):
        open_examples(tmp_path / "store", "x")
    meta.unlink()
    assert not build_examples(tmp_path / "store", "x", SPEC).reused


def test_boundaries_of_few_or_tied_events():
    assert time_boundaries(np.array([5]), 0.1, 0.1) == (6, 6)
    assert time_boundaries(np.array([5, 5, 5, 5]), 0.25, 0.25) == (5, 5)
    assert time_boundaries(np.arange(100), 0.1, 0.1) == (80, 90)
    assert time_boundaries(np.arange(100), 0.0, 0.1) == (90, 90)


def test_real_ratings_make_sensible_sessions(shared_data):
    with open(shared_data / "ml-latest-small" / "ratings.csv") as file:
        rows = list(csv.DictReader(file))
    table = pa.table({"user_id": [int(r["userId"]) for r in rows], "item_id": [int(r["movieId"]) for r in rows],
                      "event_time": [int(r["timestamp"]) * S for r in rows],
                      "rating": pa.array([float(r["rating"]) for r in rows], pa.float32())})
    result = sessions(table)
    assert 610 < len(result) < len(rows) and len(result.candidates.values) <= len(rows)
    parts = time_split(result, *time_boundaries(np.asarray(table["event_time"]), 0.1, 0.1))
    assert all(len(part) for part in parts.values())
    assert sum(len(part) for part in parts.values()) == len(result)
