"""Event keys survive a restart, a crash between intent and append, and forget in time."""

import pyarrow as pa
import pytest

from semel.serving.keys import EventKeys, event_digest

HOUR = 3600 * 1_000_000


def events(*users):
    return pa.table({"user_id": pa.array(users, pa.int64()), "event_time": pa.array([1] * len(users), pa.int64())})


def test_a_key_belongs_to_one_user():
    assert event_digest(1, "k") == event_digest(1, "k")
    different = [event_digest(1, "k"), event_digest("1", "k"), event_digest(11, "k"), event_digest(1, "1k"),
                 event_digest("k", "1"), event_digest("ü", "ключ")]
    assert len(set(different)) == len(different)


def test_keys_are_known_after_a_restart_and_the_last_intent_is_pending(tmp_path):
    keys = EventKeys(tmp_path, now=0)
    one, two = event_digest(1, "a"), event_digest(1, "b")
    keys.intend("first", events(1), [one], now=10)
    keys.settle()
    keys.intend("second", events(1, 2), [two, None], now=20)
    keys.close()  # as if the process had died before the append

    again = EventKeys(tmp_path, now=30)
    assert one in again and two in again and len(again) == 2
    token, table = again.pending
    assert token == "second" and table.equals(events(1, 2))
    again.settle()
    again.intend("third", events(3), [event_digest(3, "c")], now=40)
    again.close()
    assert len(EventKeys(tmp_path, now=50)) == 3


def test_an_unsettled_intent_blocks_the_next():
    with pytest.raises(RuntimeError, match="not settled"):
        import tempfile
        with tempfile.TemporaryDirectory() as folder:
            keys = EventKeys(folder, now=0)
            keys.intend("a", events(1), [event_digest(1, "a")], now=1)
            keys.intend("b", events(2), [event_digest(2, "a")], now=2)


def test_a_withdrawn_intent_frees_its_keys_also_after_a_restart(tmp_path):
    keys = EventKeys(tmp_path, now=0)
    kept, freed = event_digest(1, "kept"), event_digest(1, "freed")
    keys.intend("a", events(1), [kept], now=1)
    keys.settle()
    keys.intend("b", events(1), [freed], now=2)
    keys.withdraw([freed], now=3)
    assert keys.pending is None and freed not in keys
    keys.close()
    again = EventKeys(tmp_path, now=4)
    assert again.pending is None and freed not in again and kept in again


def test_keys_are_forgotten_after_the_window_and_beyond_the_capacity(tmp_path):
    keys = EventKeys(tmp_path, now=0, window_us=HOUR, capacity=3, segment_bytes=1)
    digests = [event_digest(1, str(number)) for number in range(6)]
    for number, digest in enumerate(digests[:5]):
        keys.intend(str(number), events(1), [digest], now=number)
        keys.settle()
    assert [digest in keys for digest in digests] == [False, False, True, True, True, False]
    keys.intend("late", events(1), [digests[5]], now=2 * HOUR)
    keys.settle()
    assert [digest in keys for digest in digests] == [False] * 5 + [True]
    assert len(list(tmp_path.glob("*.log"))) == 1  # the files of forgotten keys are gone
    keys.close()
    assert len(EventKeys(tmp_path, now=2 * HOUR, window_us=HOUR)) == 1


def test_a_torn_end_is_ignored(tmp_path):
    keys = EventKeys(tmp_path, now=0)
    keys.intend("a", events(1), [event_digest(1, "a")], now=1)
    keys.settle()
    keys.intend("b", events(2), [event_digest(2, "b")], now=2)
    keys.close()
    path = next(tmp_path.glob("*.log"))
    path.write_bytes(path.read_bytes()[:-9])
    again = EventKeys(tmp_path, now=3)
    assert event_digest(1, "a") in again and event_digest(2, "b") not in again
