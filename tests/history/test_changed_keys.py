"""``changed_keys``: whose events a reader that keeps something by user has to look at again."""

import pyarrow as pa
import pytest

from semel.history import EventSchema, HistoryStore


@pytest.mark.parametrize("strings", [False, True])
def test_those_with_later_events_or_deletions_whatever_was_compacted(tmp_path, strings):
    kind = pa.string() if strings else pa.int64()

    def names(*numbers):
        return [f"ü{number}" if strings else number for number in numbers]

    def append(store, *numbers):
        return store.append(pa.table({"user_id": pa.array(names(*numbers), kind), "event_time": [1] * len(numbers),
                                      "item_id": [7] * len(numbers)}))

    with HistoryStore.create(tmp_path / "store", EventSchema({"item_id": pa.int64()}, user_id=kind), shards=2) as store:
        assert store.changed_keys(0).tolist() == []
        first = append(store, 3, 1)
        second = append(store, 1, 2)
        with HistoryStore.open(tmp_path / "store") as reader:  # has loaded nothing yet
            for handle in (store, reader):
                assert handle.changed_keys(0).tolist() == names(1, 2, 3)
                assert handle.changed_keys(first).tolist() == names(1, 2)
                assert handle.changed_keys(second).tolist() == []
            third = store.delete(names(3))
            assert reader.changed_keys(second).tolist() == [] and reader.refresh() == third
            for handle in (store, reader):
                assert handle.changed_keys(second).tolist() == names(3)
                assert handle.changed_keys(third).tolist() == []
        store.compact()
        with HistoryStore.open(tmp_path / "store") as reader:
            for handle in (store, reader):
                assert handle.changed_keys(0).tolist() == names(1, 2, 3)
                assert handle.changed_keys(first).tolist() == names(1, 2, 3)
                assert handle.changed_keys(second).tolist() == names(3)
                assert handle.changed_keys(third).tolist() == []
        append(store, 5)
        assert store.changed_keys(third).tolist() == names(5)
        assert store.changed_keys(second).tolist() == names(3, 5)
        store.compact()
        assert store.changed_keys(third).tolist() == names(5)
        with HistoryStore.open(tmp_path / "store", at_version=third) as frozen:
            assert frozen.changed_keys(third).tolist() == []
