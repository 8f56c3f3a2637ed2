"""Positions: how far a source has got, moved by the append of its events, compared before it moves, kept but once."""

import random
import threading

import pyarrow as pa
import pytest

from semel.history import EventSchema, HistoryStore, PositionMoved, Projection, WriterClient, WriterServer
from semel.history.log.positions import Position, Tokens

SCHEMA = EventSchema({"item_id": pa.int64()})


def event(*items):
    return pa.table({"user_id": pa.array([1] * len(items), pa.int64()), "event_time": pa.array(items, pa.int64()),
                     "item_id": pa.array(items, pa.int64())})


NOTHING = event()


def items(store):
    return store.read(store.point([1], 10**9), Projection(("item_id",)))["item_id"].values.tolist()


def test_a_position_moves_with_its_append_and_survives_reopening_and_compaction(tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA) as store:
        reader = HistoryStore.open(tmp_path / "s")
        assert store.position("a") == Position("a", 0, None) == reader.position("a")
        assert store.append(event(1), token=store.position("a").then({"0": 1})) == 1
        assert store.append(event(2), token=store.position("b").then([7])) == 2
        store.append(event(3))
        assert store.position("a") == Position("a", 1, {"0": 1})
        assert store.append(NOTHING, token=store.position("a").then({"0": 5})) == 4, "no event, but a step"
        store.compact()
        reader.refresh()
        assert store.position("a") == Position("a", 4, {"0": 5}) == reader.position("a")
        store.append(event(4), token=store.position("a").then({"0": 6}))
        reader.refresh()
        assert reader.position("a") == Position("a", 5, {"0": 6}) and reader.position("b").state == [7]
    for mode in ("r", "a"):
        with HistoryStore.open(tmp_path / "s", mode=mode) as store:
            assert store.position("a") == Position("a", 5, {"0": 6})
    reader.close()


def test_an_append_that_goes_on_from_elsewhere_is_refused(tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA) as store:
        start = store.position("a")
        first = start.then(1)
        assert store.append(event(1), token=first) == store.append(event(1), token=first) == 1, "a retry is one append"
        with pytest.raises(PositionMoved, match="taken a on"):
            store.append(event(2), token=start.then(2))
        store.append(event(3), token=store.position("a").then(3))
        with pytest.raises(PositionMoved):
            store.append(event(1), token=first)
        assert items(store) == [1, 3] and store.position("a").state == 3
        with pytest.raises(ValueError, match=r"Position\.then"):
            store.append(event(4), token="position:mine")


def test_only_the_last_position_of_a_source_is_kept(tmp_path):
    with HistoryStore.create(tmp_path / "s", SCHEMA) as store:
        for n in range(50):
            store.append(event(n), token=store.position(f"source {n % 2}").then(n))
            store.append(event(n), token=f"other {n}")
        store.compact()
    folder = next((tmp_path / "s" / "generations").iterdir())
    text = (folder / "tokens.bytes").read_bytes()
    assert text.count(b"position:") == 2 and text.count(b"other ") == 50


def test_tokens_in_any_order_keep_the_newest_position():
    steps = [Position("a", 0).then(1), Position("a", 4).then(2), Position("a", 9).then(3)]
    for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
        tokens = Tokens({steps[i]: (4, 9, 12)[i] for i in order})
        assert tokens.position("a") == Position("a", 12, 3) and len(tokens) == 1


@pytest.mark.timeout(60)
def test_of_processes_that_race_each_step_is_taken_once(tmp_path):
    """Each reader takes what comes next of one source; refused, it looks where the source stands and goes on there."""
    with HistoryStore.create(tmp_path / "s", SCHEMA) as store, WriterServer(store, tmp_path / "w.sock"):
        refused = []

        def read_on(chance):
            with WriterClient(tmp_path / "w.sock") as client:
                while (begin := (here := store.position("a")).state or 0) < 60:
                    end = begin + chance.randint(1, 3)
                    try:
                        client.append(event(*range(begin + 1, end + 1)), token=here.then(end))
                    except PositionMoved as error:
                        refused.append(error)

        threads = [threading.Thread(target=read_on, args=(random.Random(seed),)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert items(store) == list(range(1, store.position("a").state + 1)) and refused
