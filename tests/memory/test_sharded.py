"""A memory that ranks share is one memory: each key has one owner, whoever writes or asks."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.comm import run_threads
from semel.memory import DeltaPublisher, DeltaSubscriber, ItemMemory, ShardedMemory
from semel.memory.sharded import owners

DIM = 3
WRITES = st.lists(st.lists(st.lists(st.integers(-20, 20), max_size=8), min_size=3, max_size=3), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(writes=WRITES, asked=st.lists(st.integers(-25, 25), max_size=10))
def test_ranks_together_are_one_memory(writes, asked):
    """Against one table, to which of each step's rows the lowest rank's is written last."""
    plain = ItemMemory(100, DIM).eval()
    vector = {}
    for step, parts in enumerate(writes):
        for rank in reversed(range(3)):
            keys = torch.tensor(parts[rank], dtype=torch.int64)
            vector[step, rank] = torch.randn(len(keys), DIM)
            plain.write(keys, vector[step, rank], step, now=step)

    def work(transport):
        memory = ShardedMemory(ItemMemory(100, DIM).eval(), transport)
        for step, parts in enumerate(writes):
            keys = torch.tensor(parts[transport.rank], dtype=torch.int64)
            memory.write(keys, vector[step, transport.rank], step, now=step)
        read = memory.read(torch.tensor(asked[transport.rank :], dtype=torch.int64), now=100)
        assert memory.owned(memory.memory.rows().keys).all()
        ages = memory.ages(torch.tensor(asked[transport.rank :], dtype=torch.int64), now=100)
        assert torch.equal(ages, read[2])
        return len(memory.memory), read

    found = run_threads(3, work)
    assert sum(size for size, _ in found) == len(plain)
    for rank, (_, read) in enumerate(found):
        want = plain.read(torch.tensor(asked[rank:], dtype=torch.int64), now=100)
        assert all(torch.equal(a, b) for a, b in zip(read, want, strict=True))


def test_each_rank_publishes_its_shard_of_one_log(tmp_path):
    keys, vectors = torch.arange(50), torch.randn(50, DIM)

    def work(transport):
        memory = ShardedMemory(ItemMemory(100, DIM), transport)
        publisher = memory.publisher(tmp_path)
        memory.write(keys[transport.rank :: 2], vectors[transport.rank :: 2], 1)
        publisher.flush(1)
        memory.delete(keys[:5] if transport.rank else keys[:0])
        publisher.flush(2)
        return publisher.epoch, publisher.shard

    assert run_threads(2, work) == [(1, 0), (1, 1)]
    subscriber = DeltaSubscriber(tmp_path)
    subscriber.poll()
    assert subscriber.position.sequence == 2 and subscriber.position.shards == 2
    got, hit, _ = subscriber.memory.read(keys)
    assert hit.tolist() == [False] * 5 + [True] * 45 and torch.equal(got[5:], vectors[5:])


def test_shards_that_check_first_stay_at_one_sequence_number(tmp_path, monkeypatch):
    """A sink that does not answer one of them: neither publishes, and nothing is lost."""
    first = DeltaPublisher(one := ItemMemory(50, DIM), tmp_path, shards=2)
    second = DeltaPublisher(other := ItemMemory(50, DIM), tmp_path, shard=1, shards=2, epoch=first.epoch)

    def publish(step):
        for publisher in (first, second):
            publisher.check()
        for publisher in (first, second):
            publisher.record(step)

    one.write([2], torch.full((1, DIM), 2.0), 1)
    publish(1)
    create, names = second.sink.create, second.sink.names

    def silent(*_):
        raise OSError("no answer")

    monkeypatch.setattr(second.sink, "names", silent)
    other.write([3], torch.full((1, DIM), 3.0), 2)
    with pytest.raises(OSError, match="no answer"):
        publish(2)
    assert first.sequence == second.sequence == 1 and second.backlog == 1
    monkeypatch.setattr(second.sink, "names", names)
    monkeypatch.setattr(second.sink, "create", silent)  # it is gone between the check and the record
    with pytest.raises(OSError, match="no answer"):
        publish(2)
    assert first.sequence == second.sequence == 2
    subscriber = DeltaSubscriber(tmp_path)
    subscriber.poll()
    assert subscriber.position.sequence == 1
    monkeypatch.setattr(second.sink, "create", create)
    publish(3)
    subscriber.poll()
    assert subscriber.position.sequence == 3
    assert subscriber.memory.rows().keys.tolist() == [2, 3]


def test_keys_spread_evenly_and_bad_rows_are_refused():
    counts = np.bincount(owners(np.arange(10_000), 4), minlength=4)
    assert counts.min() > 2300 and counts.max() < 2700

    def work(transport):
        memory = ShardedMemory(ItemMemory(100, DIM), transport)
        with pytest.raises(ValueError, match=r"key 7 .* NaN"):
            memory.write(torch.tensor([7]), torch.full((1, DIM), torch.nan))
        with pytest.raises(ValueError, match="1 keys need"):
            memory.write(torch.tensor([7]), torch.zeros(1, DIM + 1))
        return len(memory.memory)

    assert run_threads(2, work) == [0, 0]
