import numpy as np
import pyarrow as pa
import pytest

from semel.examples import leave_one_out, sequences_before
from semel.history import EventSchema, HistoryStore


@pytest.fixture(params=[pa.int64(), pa.string()], ids=["integer ids", "string ids"])
def store(request, tmp_path):
    kind = request.param
    with HistoryStore.create(tmp_path / "store", EventSchema({"item_id": kind}, user_id=kind)) as store:
        for rows in ([(1, 10, 1), (1, 30, 3), (2, 7, 9), (3, 5, 4), (3, 5, 5), (4, 1, 2), (4, 2, 1)],
                     [(1, 20, 2), (1, 30, 4), (3, 5, 6)]):
            text = (lambda n: f"ü{n}") if kind == pa.string() else (lambda n: n)
            store.append(pa.table({"user_id": pa.array([text(u) for u, _, _ in rows], kind),
                                   "event_time": [t for _, t, _ in rows],
                                   "item_id": pa.array([text(i) for *_, i in rows], kind)}))
        yield store


def items(table):
    if "item_id" in (table.dictionaries or {}):
        flat = np.array([int(text[1:]) for text in table.strings("item_id")], dtype=np.int64)
    else:
        flat = table.columns["item_id"]
    return [flat[a:b].tolist() for a, b in zip(table.offsets[:-1], table.offsets[1:], strict=True)]


def test_the_last_events_are_kept_apart_in_stable_order(store):
    for _ in range(2):
        sequences = leave_one_out(store)
        assert len(sequences) == 4 and items(sequences.histories) == [[1, 2, 3, 4], [9], [4, 5, 6], [2, 1]]
        assert sequences.evaluated.tolist() == [True, False, True, False]
        assert items(sequences.train()) == [[1, 2], [9], [4], [2, 1]]
        before, target = sequences.validation()
        assert (items(before), items(target)) == ([[1, 2], [4]], [[3], [5]])
        before, target = sequences.test()
        assert (items(before), items(target)) == ([[1, 2, 3], [4, 5]], [[4], [6]])
        assert before["event_time"].values.tolist() == [10, 20, 30, 5, 5]
        store.compact()


def test_short_histories_may_be_left_out_and_one_event_held_out(store):
    sequences = leave_one_out(store, holdout=1, min_events=2)
    assert items(sequences.train()) == [[1, 2, 3], [4, 5], [2]]
    with pytest.raises(ValueError, match="2 are needed"):
        sequences.validation()
    with pytest.raises(ValueError, match="negative"):
        leave_one_out(store, holdout=-1)


def test_sequences_before_a_moment_know_nothing_of_later(store):
    sequences = sequences_before(store, 20)
    assert items(sequences.train()) == [[1], [9], [4, 5, 6], [2, 1]]
    assert sequences.holdout == 0 and sequences.evaluated.all()
    assert len(sequences_before(store, 0)) == 0
