"""Promises 1 and 5, where the loader keeps them: however requests are shuffled, split over ranks, read ahead or
resumed, an epoch is each request once, in the same batches, and each gets the history that a read of its own gives."""

import json
from itertools import chain

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, Pointers, RequestRows, offsets_of
from semel.examples import RequestLoader, materialize
from semel.features import Feature, FeatureSpec
from semel.history import EventSchema, HistoryStore

SPEC = FeatureSpec(history=(Feature("item_id"), Feature("action")), history_last=9)
REQUESTS = 90


@pytest.fixture(scope="module", params=["integer users", "string users"])
def world(request, tmp_path_factory):
    """A store of five versions, the last of them not compacted, with ties and late events, and requests at times and
    versions of their own."""
    text = request.param == "string users"
    rng = np.random.default_rng(7)
    kind = pa.string() if text else pa.int64()
    schema = EventSchema({"item_id": pa.int64(), "action": pa.string()}, kind)
    store = HistoryStore.create(tmp_path_factory.mktemp("once") / "store", schema, shards=3)

    def users(numbers):
        return [f"ü{n}" for n in numbers] if text else numbers

    for version in range(5):
        count = 120
        store.append(pa.table({
            "user_id": pa.array(users(rng.integers(0, 9, count).tolist()), kind),
            "event_time": rng.integers(0, 40 * (version + 1), count), "item_id": rng.integers(0, 99, count),
            "action": rng.choice(["view", "buy"], count)}))
        if version == 3:
            store.compact()
    lengths = rng.integers(0, 4, REQUESTS)
    who = users(rng.integers(0, 10, REQUESTS).tolist())
    rows = RequestRows(
        np.array([f"r{i}" for i in range(REQUESTS)], object),
        Pointers(np.array(who, object if text else np.int64), rng.integers(0, 210, REQUESTS),
                 np.where(rng.random(REQUESTS) < 0.5, 5, rng.integers(1, 6, REQUESTS))),
        np.zeros(REQUESTS, np.int64), {}, Jagged(np.arange(lengths.sum()), offsets_of(lengths)),
        {"like": np.ones(lengths.sum(), np.float32)}, {"like": np.ones(lengths.sum(), bool)})
    alone = {name: materialize(rows.select(np.array([row])), store, None, SPEC)
             for row, name in enumerate(rows.request_id)}
    yield store, rows, alone
    store.close()


def check(batch, alone):
    """Every request of the batch has what it has alone, bit for bit; the requests' names."""
    for row, name in enumerate(batch.request_id):
        one, other = batch.slice(row, row + 1), alone[name]
        for column in ("item_id", "action", "event_time"):
            assert torch.equal(one.request["history"][column].values, other.request["history"][column].values)
        assert torch.equal(one.request["history"].status, other.request["history"].status)
        assert torch.equal(one.candidate["item_id"], other.candidate["item_id"])
        assert torch.equal(one.label["like"], other.label["like"])
    return batch.request_id.tolist()


@settings(max_examples=30, deadline=None)
@given(shuffle=st.sampled_from(["window", "full", None]), window=st.integers(1, 100), together=st.integers(1, 20),
       size=st.integers(1, 40), tokens=st.sampled_from([None, 1, 30, 200]), seed=st.integers(0, 3),
       epoch=st.integers(0, 3), world_size=st.integers(1, 6), workers=st.integers(0, 2), data=st.data())
def test_ranks_together_are_the_whole_and_a_state_goes_on_where_it_was(
        world, shuffle, window, together, size, tokens, seed, epoch, world_size, workers, data):
    store, rows, alone = world

    def loader(rank=0, ranks=1, threads=0):
        made = RequestLoader(rows, store, features=SPEC, shuffle=shuffle, window=window, together=together,
                             batch_requests=size, batch_tokens=tokens, seed=seed, rank=rank, world_size=ranks,
                             workers=threads)
        made.set_epoch(epoch)
        return made

    whole = [check(batch, alone) for batch in loader()]
    assert sorted(chain(*whole)) == sorted(rows.request_id)
    shares = [[check(batch, alone) for batch in loader(rank, world_size, workers)] for rank in range(world_size)]
    assert [list(chain(*parts)) for parts in zip(*shares, strict=True)] == whole

    stop = data.draw(st.integers(1, len(whole)), label="stop after")
    first = loader(threads=workers)
    for step, _ in enumerate(first, 1):
        if step == stop:
            state = json.loads(json.dumps(first.state_dict()))
            break
    resumed = []
    for rank in range(world_size):
        again = loader(rank, world_size, workers)
        again.load_state_dict(state)
        resumed.append([check(batch, alone) for batch in again])
        assert again.epoch == epoch + 1
    assert [list(chain(*parts)) for parts in zip(*resumed, strict=True)] == whole[stop:]
