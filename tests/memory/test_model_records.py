"""Dense weights in a log of deltas: behind the rows that they go with, whole or not at all, never cut off."""

import pytest
import torch

from semel.memory import CorruptDelta, DeltaPublisher, DeltaSubscriber, ItemMemory


def written(memory, step):
    memory.write(torch.arange(step, step + 3), torch.randn(3, 4), step)


def test_weights_come_with_the_rows_before_them(tmp_path):
    memory = ItemMemory(50, 4)
    publisher, reader = DeltaPublisher(memory, tmp_path), DeltaSubscriber(tmp_path)
    reader.poll()
    assert reader.model() is None and reader.model_position is None
    written(memory, 1)
    assert publisher.publish_model(b'{"version": "a"}', b"\0weights") == 1
    assert publisher.publish_model(b'{"version": "b"}', b"") == 2  # a place of its own, though no row has changed
    written(memory, 3)
    publisher.flush()
    reader.poll()
    found = reader.model()
    assert (found.description, found.weights) == (b'{"version": "b"}', b"")
    assert (found.position.epoch, found.position.sequence) == (1, 2) and reader.position.sequence == 3
    assert DeltaSubscriber(tmp_path).model() is None  # before it has looked
    for path in tmp_path.rglob("delta-*-000000000002"):
        path.unlink()
    late = DeltaSubscriber(tmp_path)
    late.poll()  # cannot go on to the rows of the second
    assert late.position.sequence == 1 and late.model().weights == b"\0weights"


def test_they_outlive_the_rows_and_the_publisher(tmp_path):
    memory = ItemMemory(50, 4)
    publisher = DeltaPublisher(memory, tmp_path, snapshot_every=2, keep=1)
    for number in range(3):
        publisher.publish_model(b"{}", bytes([number]))
    for step in range(8):
        written(memory, step)
        publisher.flush()
    assert len(list(tmp_path.rglob("model-*"))) == 1
    reader = DeltaSubscriber(tmp_path)
    reader.poll()
    assert reader.model().weights == b"\2"
    second = DeltaPublisher(memory, tmp_path, snapshot_every=2, keep=1)
    reader.poll()
    assert reader.position.epoch == 2 and reader.model().weights == b"\2"
    second.publish_model(b"{}", b"new")
    reader.poll()
    assert reader.model().weights == b"new"


def test_damage_is_said_and_what_could_not_be_sent_goes_first(tmp_path, monkeypatch):
    memory = ItemMemory(50, 4)
    publisher, reader = DeltaPublisher(memory, tmp_path), DeltaSubscriber(tmp_path)
    create = publisher.sink.create

    def away(name, content):
        raise OSError("away")

    written(memory, 1)
    monkeypatch.setattr(publisher.sink, "create", away)
    with pytest.raises(OSError, match="away"):
        publisher.flush()
    with pytest.raises(OSError, match="away"):
        publisher.publish_model(b"{}", b"weights")
    monkeypatch.setattr(publisher.sink, "create", create)
    publisher.flush()
    reader.poll()
    assert len(reader.memory) == 3 and reader.model().weights == b"weights"
    publisher.publish_model(b"{}", b"later")
    reader.poll()
    assert reader.model().weights == b"later"
    path = max(tmp_path.rglob("model-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptDelta, match="checksum"):
        reader.model()
    rows = min(tmp_path.rglob("delta-*"))
    rows.write_bytes(min(tmp_path.rglob("model-*")).read_bytes())
    late = DeltaSubscriber(tmp_path)
    late.poll()
    with pytest.raises(CorruptDelta, match="holds the record"):
        late.poll()
    with pytest.raises(ValueError, match="shard 0 publishes the weights"):
        DeltaPublisher(memory, tmp_path, shard=1, shards=2, epoch=1).publish_model(b"{}", b"")
