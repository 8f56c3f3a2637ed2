"""What a server holds is bounded by design: requests, events and outcomes leave nothing behind in it."""

import gc
import time
import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from semel.examples import ExposureLog
from semel.serving.compactor import Compactor, GivenUp
from semel.serving.keys import EventKeys, event_digest
from semel.serving.predictor import Predictor
from semel.serving.writers import ExposureWriter, Writers
from semel.serving.writes import RowWriter
from serving.stand_ins import make_store, seen_items, stand_in

ROUNDS, POSTS, ROWS = 7, 16, 60


def events(number, rows=ROWS):
    return [{"user_id": (number + row) % 20, "event_time": 10**15 + number, "item_id": row, "rating": 3.0,
             "action": "rate", "event_key": f"{number}-{row}"} for row in range(rows)]


def outcomes(number):
    return [{"request_id": f"r{number}", "item_id": row, "label": {"like": 1.0}, "outcome_key": f"{number}-{row}"}
            for row in range(ROWS)]


def wait_for(condition, seconds=30):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it never came to be"
        time.sleep(0.01)


def test_memory_that_objects_hold_stays_flat(tmp_path):
    store, catalogue = make_store(tmp_path / "store")
    exposures = ExposureWriter(ExposureLog(tmp_path / "store" / "exposures"), remember=64)
    held = []
    with store, Predictor(stand_in(seen_items), store, catalogue, exposures=exposures, state_bytes=0) as predictor:
        writers = Writers(store, catalogue, "item_id", exposures, predictor.clock.now, remember=256)
        try:
            for number in range(ROUNDS * POSTS):
                if number == POSTS:  # all is compiled
                    tracemalloc.start()
                predictor.rank(number % 20, [number % 40, (number + 1) % 40], {"surface": "home"})
                for writer, rows in ((writers.rows["events"], (events(number), "events")),
                                     (writers.outcomes, (outcomes(number),))):
                    assert writer.submit(writer.rows(*rows)).result().accepted == ROWS
                if number % POSTS == POSTS - 1:  # the end of a round
                    predictor.flush()
                    compactor = Compactor([store], rows=POSTS * ROWS // 2, look=0.01)
                    wait_for(lambda: store.uncompacted == 0)
                    compactor.close()
                    if tracemalloc.is_tracing():
                        gc.collect()
                        held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
            writers.close()
    # A row or a key that is left behind takes 100 bytes at least: those of a round 190,000: a tenth.
    assert held[-1] - held[2] < 19_000 * (len(held) - 3), held


def test_tokens_of_keyed_events_do_not_gather(tmp_path):
    store, _ = make_store(tmp_path / "store")
    with store:
        writer = RowWriter("event", store, tmp_path / "keys", time.time_ns)
        for number in range(40):
            writer.submit(writer.rows(events(number, 1), "events")).result()
        writer.close()
        assert len(store._writer.tokens) == 1  # there is no public way to see what a writer holds
        assert store.position("server").version == store.version


@pytest.mark.parametrize("appended", [False, True])
def test_an_intent_that_a_crash_left_is_appended_once(tmp_path, appended):
    store, _ = make_store(tmp_path / "store")
    with store:
        before = store.event_count
        writer = RowWriter("event", store, tmp_path / "keys", time.time_ns)
        writer.submit(writer.rows(events(0), "events")).result()
        job = writer.rows(events(1), "events")
        token = store.position("server").then("next")
        writer.keys.intend(token, job.table, job.digests, 1)
        if appended:
            store.append(job.table, token=token)
        writer.close()
        for _ in range(2):
            again = RowWriter("event", store, tmp_path / "keys", time.time_ns)
            assert store.event_count == before + 2 * ROWS
            assert again.submit(again.rows(events(1), "events")).result().duplicates == ROWS
            again.close()


def test_keys_of_an_older_copy_hold_nobody_up(tmp_path):
    store, _ = make_store(tmp_path / "store")
    with store:
        keys = EventKeys(tmp_path / "keys", 0)
        table = pa.table({"user_id": [1], "event_time": [5], "item_id": [1], "rating": pa.array([1.0], pa.float32()),
                          "action": ["rate"]})
        keys.intend(store.position("server").then("a"), table, [event_digest(1, "a")], 1)
        store.append(table, token=keys.pending[0])
        store.append(table, token=store.position("server").then("b"))
        keys.close()
        count = store.event_count
        writer = RowWriter("event", store, tmp_path / "keys", time.time_ns)
        assert store.event_count == count
        writer.submit(writer.rows(events(3), "events")).result()
        writer.close()


def test_a_large_store_is_compacted_by_an_eighth(tmp_path):
    store, _ = make_store(tmp_path / "store")
    with store:
        compactor = Compactor([store], rows=10)
        wait_for(lambda: store.uncompacted == 0)
        compactor.close()
        table = store.schema.arrow.empty_table()
        assert not compactor.due(store)
        rows = store.event_count // 8 + 1
        for count in (rows - 2, 2):
            assert not compactor.due(store)
            table = pa.table({"user_id": np.arange(count), "event_time": np.arange(count), "item_id": np.arange(count),
                              "rating": pa.array(np.ones(count), pa.float32()), "action": ["rate"] * count})
            store.append(table)
        assert compactor.due(store) and compactor.compacted == 1
        assert Compactor([store], rows=0)._thread is None  # 0: never


def test_a_compaction_that_fails_is_told_of_and_the_store_goes_on(tmp_path):
    store, _ = make_store(tmp_path / "store")
    with store:
        generation = store.generation
        blocked = tmp_path / "store" / f".generation-{generation + 1:08d}.building"
        compact, store.compact = store.compact, _full_disk
        compactor = Compactor([store], rows=10, look=0.01)
        wait_for(lambda: compactor.failure is not None)
        assert "no space" in str(compactor.failure) and store.generation == generation and not blocked.exists()
        store.compact = compact
        compactor.close()


def _full_disk(**_):
    raise OSError(28, "no space left on device")


def test_a_compaction_that_the_end_overtakes_leaves_the_store_as_it_was(tmp_path):
    store, _ = make_store(tmp_path / "store")
    with store:
        compactor = Compactor([store], rows=10**9)
        compactor.close()
        before = store.generation, store.version, store.uncompacted
        with pytest.raises(GivenUp):
            store.compact(workers=1, progress=compactor._between_shards)
        assert (store.generation, store.version, store.uncompacted) == before and before[2]
        writer = RowWriter("event", store, tmp_path / "keys", time.time_ns)
        writer.submit(writer.rows(events(0), "events")).result()
        writer.close()
        assert store.verify()["files"]
    with type(store).open(tmp_path / "store", mode="a") as again:
        assert again.uncompacted == before[2] + ROWS
        again.compact()
        assert again.uncompacted == 0


def test_negative_rows_are_refused():
    with pytest.raises(ValueError, match="cannot be compacted after -1 rows"):
        Compactor([], rows=-1)
