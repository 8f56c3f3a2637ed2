"""Publisher and subscriber: what arrives is the trainer's table, whatever happens on the way."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from semel.memory import (
    CorruptDelta,
    DeltaGap,
    DeltaPublisher,
    DeltaSubscriber,
    Fenced,
    ItemMemory,
    Position,
    memory_at,
)

DIM = 4


def contents(memory: ItemMemory | None) -> dict[int, tuple]:
    assert memory is not None
    rows = memory.rows()
    return {int(k): (v.numpy().tobytes(), int(s), int(w), int(t))
            for k, v, s, w, t in zip(rows.keys, rows.vectors, rows.step, rows.written, rows.tower, strict=True)}


def write(memory: ItemMemory, keys: list[int], value: float, step: int = 0) -> None:
    memory.write(keys, torch.full((len(keys), DIM), float(value)), step)


def test_a_reader_follows(tmp_path: Path) -> None:
    memory = ItemMemory(4, DIM)
    write(memory, [1, 2], 1.0)
    reader = DeltaSubscriber(tmp_path)
    assert reader.poll() == 0 and reader.memory is None and reader.position is None
    publisher = DeltaPublisher(memory, tmp_path)
    assert reader.poll() == 2 and reader.position == Position(1, 0)
    assert publisher.flush() == 0 and reader.poll() == 0
    write(memory, [2, 3], 2.0, step=7)
    memory.delete([1])
    assert publisher.flush() == 1
    assert reader.poll() == 3 and reader.position == Position(1, 1)
    assert contents(reader.memory) == contents(memory)
    for step in range(5):  # rows leave for others: the reader's, of the same size, never has to choose
        write(memory, list(range(step, step + 4)), step, step)
        publisher.flush()
        reader.poll()
        assert contents(reader.memory) == contents(memory)
    assert all(0 <= seconds < 60 for seconds in reader.freshness)


def test_the_readers_memory_is_read_only(tmp_path: Path) -> None:
    memory = ItemMemory(4, DIM)
    with DeltaPublisher(memory, tmp_path):
        write(memory, [1], 1.0)
    reader = DeltaSubscriber(tmp_path)
    reader.poll()
    assert reader.memory is not None
    with pytest.raises(ValueError, match="read-only: it follows"):
        write(reader.memory, [1], 2.0)
    with pytest.raises(ValueError, match="read-only"):
        reader.memory.delete([1])


def test_a_new_publisher_is_a_new_epoch_and_the_old_one_is_fenced(tmp_path: Path) -> None:
    first, second = ItemMemory(4, DIM), ItemMemory(4, DIM)
    write(first, [1, 2], 1.0)
    old = DeltaPublisher(first, tmp_path)
    reader = DeltaSubscriber(tmp_path)
    reader.poll()
    write(second, [1], 5.0)  # a trainer that went back to its checkpoint
    new = DeltaPublisher(second, tmp_path)
    write(first, [3], 3.0)
    with pytest.raises(Fenced, match="epoch 2 has begun"):
        old.flush()
    reader.poll()
    assert reader.position == Position(2, 0) and contents(reader.memory) == contents(second)
    write(second, [9], 9.0)
    new.flush()
    reader.poll()
    assert contents(reader.memory) == contents(second)


def test_a_missing_record_is_refused_until_a_snapshot_comes(tmp_path: Path) -> None:
    memory = ItemMemory(8, DIM)
    publisher = DeltaPublisher(memory, tmp_path, snapshot_every=4)
    reader = DeltaSubscriber(tmp_path)
    reader.poll()
    for step in range(3):
        write(memory, [step], step)
        publisher.flush()
    (tmp_path / "00000001" / "delta-0000-000000000002").unlink()
    with pytest.raises(DeltaGap, match="record 2 of shard 0 in epoch 1 is missing"):
        reader.poll()
    assert reader.position == Position(1, 1) and set(contents(reader.memory)) == {0}
    write(memory, [7], 7.0)
    publisher.flush()  # the fourth: a snapshot follows
    assert reader.poll() == 4
    assert reader.position == Position(1, 4) and contents(reader.memory) == contents(memory)


@pytest.mark.parametrize("damage", ["cut", "flip", "swap", "empty", "other"])
def test_a_damaged_record_never_gives_a_wrong_vector(tmp_path: Path, damage: str) -> None:
    memory = ItemMemory(8, DIM)
    publisher = DeltaPublisher(memory, tmp_path)
    reader = DeltaSubscriber(tmp_path)
    reader.poll()
    for step in range(2):
        write(memory, [step], step + 1)
        publisher.flush()
    path = tmp_path / "00000001" / "delta-0000-000000000002"
    content = path.read_bytes()
    changed = {"cut": content[:-3], "flip": content[:60] + bytes([content[60] ^ 4]) + content[61:], "empty": b"",
               "swap": (tmp_path / "00000001" / "delta-0000-000000000001").read_bytes(), "other": b"x" * 100}[damage]
    path.write_bytes(changed)
    with pytest.raises(CorruptDelta, match="delta-0000-000000000002"):
        reader.poll()
    assert reader.position == Position(1, 1) and set(contents(reader.memory)) == {0}
    path.write_bytes(content)
    assert reader.poll() == 1 and contents(reader.memory) == contents(memory)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    memory = ItemMemory(4, 2)
    memory.write([3], torch.ones(1, 2))
    publisher = DeltaPublisher(memory, tmp_path)
    memory.write([3], torch.zeros(1, 2))
    publisher.flush()
    path = tmp_path / "00000001" / "delta-0000-000000000001"
    content = path.read_bytes()
    reader = DeltaSubscriber(tmp_path)
    path.unlink()
    reader.poll()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ (1 << at % 8)]) + content[at + 1:])
        with pytest.raises(CorruptDelta):
            reader.poll()
    assert reader.memory is not None and torch.equal(reader.memory.read([3])[0], torch.ones(1, 2))


def test_the_log_is_cut_below_the_oldest_snapshot_that_is_kept(tmp_path: Path) -> None:
    memory = ItemMemory(8, DIM)
    publisher = DeltaPublisher(memory, tmp_path, snapshot_every=3, keep=2)
    states = {}
    for step in range(1, 13):
        write(memory, [step % 8], step)
        states[publisher.flush()] = contents(memory)
    names = sorted(path.name for path in (tmp_path / "00000001").glob("*-*"))
    assert names == ["delta-0000-000000000010", "delta-0000-000000000011", "delta-0000-000000000012",
                     "snapshot-0000-000000000009", "snapshot-0000-000000000012"]
    for sequence in (9, 10, 11, 12):
        assert contents(memory_at(tmp_path, 1, sequence)) == states[sequence]
    with pytest.raises(DeltaGap, match="no snapshot at or before record 8"):
        memory_at(tmp_path, 1, 8)
    DeltaPublisher(memory, tmp_path, snapshot_every=1, keep=1).flush()
    assert (tmp_path / "00000001").exists()  # nothing changed, nothing published, nothing cut
    third = DeltaPublisher(memory, tmp_path, snapshot_every=1, keep=1)
    write(memory, [1], 0.5)
    third.flush()
    left = [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*")) if path.is_file()]
    assert left == ["00000003/epoch.json", "00000003/snapshot-0000-000000000001"]


def test_shards_are_applied_together(tmp_path: Path) -> None:
    parts = [ItemMemory(4, DIM), ItemMemory(4, DIM)]
    for shard, part in enumerate(parts):
        write(part, [shard], shard)
    first = DeltaPublisher(parts[0], tmp_path, shards=2)
    reader = DeltaSubscriber(tmp_path)
    assert reader.poll() == 0 and reader.memory is None  # half an epoch
    second = DeltaPublisher(parts[1], tmp_path, shard=1, shards=2, epoch=first.epoch)
    assert reader.poll() == 2
    write(parts[0], [10], 1.0)
    assert first.flush() == 1
    assert reader.poll() == 0 and reader.position == Position(1, 0)
    assert second.flush() == 1  # an empty record: the barrier
    assert reader.poll() == 1
    assert contents(reader.memory) == contents(parts[0]) | contents(parts[1])


class Broken:
    """A sink that does not answer, before or after it has done what was asked."""

    def __init__(self, sink, failing: str = "") -> None:
        self.sink, self.failing, self.url = sink, failing, sink.url

    def create(self, name: str, content: bytes) -> None:
        if self.failing == "before":
            raise OSError("no answer")
        self.sink.create(name, content)
        if self.failing == "after":
            raise OSError("no answer")

    def __getattr__(self, name: str):
        return getattr(self.sink, name)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_sink_that_does_not_answer_loses_nothing(tmp_path: Path, when: str) -> None:
    memory = ItemMemory(8, DIM)
    publisher = DeltaPublisher(memory, tmp_path)
    reader = DeltaSubscriber(tmp_path)
    publisher.sink = broken = Broken(publisher.sink, when)
    for step in range(4):
        write(memory, [step, 5], step)
        memory.delete([step - 1])
        with pytest.raises(OSError, match="no answer"):
            publisher.flush()
        assert 0 <= publisher.backlog <= 16
    broken.failing = ""
    publisher.flush()
    assert publisher.backlog == 0
    reader.poll()
    assert contents(reader.memory) == contents(memory)


def test_in_the_background(tmp_path: Path) -> None:
    memory = ItemMemory(100, DIM)
    reader = DeltaSubscriber(tmp_path)
    with DeltaPublisher(memory, tmp_path, interval=0.05).start() as publisher:
        for step in range(20):
            write(memory, [step], step)
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        while len(contents(memory)) != len(reader.memory or ()) and time.monotonic() < deadline:
            reader.poll()
            time.sleep(0.01)
        assert contents(reader.memory) == contents(memory)
        write(memory, [50], 1.0)
    assert publisher.error is None
    reader.poll()
    assert contents(reader.memory) == contents(memory)
    assert not [thread for thread in threading.enumerate() if thread.name == "semel-deltas"]


def test_many_rows_do_not_wait_for_the_interval(tmp_path: Path) -> None:
    memory = ItemMemory(100, DIM)
    with DeltaPublisher(memory, tmp_path, interval=60, max_rows=10).start() as publisher:
        write(memory, list(range(30)), 1.0)
        deadline = time.monotonic() + 20
        while publisher.sequence == 0 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert publisher.sequence == 1


def test_a_request_sees_one_state(tmp_path: Path) -> None:
    """All rows of a state hold the same number; a reader that meets two has seen half a record."""
    memory = ItemMemory(64, DIM)
    keys = list(range(64))
    write(memory, keys, 0.0)
    publisher = DeltaPublisher(memory, tmp_path, snapshot_every=7)
    subscriber = DeltaSubscriber(tmp_path)
    subscriber.poll()
    stop, wrong, seen = threading.Event(), [], set()

    def read() -> None:
        while not stop.is_set():
            with subscriber.reading() as (table, position):
                first, _, _ = table.read(keys[:32])
                time.sleep(0.001)
                second, _, _ = table.read(keys[32:])
                values = {float(x) for x in torch.cat([first, second]).flatten().unique()}
                seen.add(position.sequence)
                if len(values) != 1 or values != {float(position.sequence)}:
                    wrong.append((position, values))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for step in range(1, 40):
            write(memory, keys, float(step))
            publisher.flush()
            subscriber.poll()
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not wrong and len(seen) > 3


def test_a_killed_publisher_leaves_a_log_that_can_be_followed(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import sys, torch
        from semel.memory import DeltaPublisher, ItemMemory
        memory = ItemMemory(50, 4)
        publisher = DeltaPublisher(memory, sys.argv[1], snapshot_every=5)
        print("ready", flush=True)
        for step in range(10**9):
            memory.write([step % 60, (7 * step) % 60], torch.full((2, 4), float(step)), step)
            publisher.flush()
    """)
    reader = DeltaSubscriber(tmp_path)
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE,
                                   env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
            deadline = time.monotonic() + 1.0
            while time.monotonic() < deadline:
                reader.poll()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(30)
            process.stdout.close()
        reader.poll()
        position = reader.position
        assert position is not None and position.sequence > 0
        assert contents(reader.memory) == contents(memory_at(tmp_path, position.epoch, position.sequence))
        assert not contents(reader.memory).keys() - set(range(60))


def test_object_storage(tmp_path: Path) -> None:
    """obstore's own store of a folder stands for a bucket: conditional puts, listings, no links."""
    from semel.memory.sink import ObjectSink

    sink = ObjectSink("memory:///")
    sink.create("a/one", b"1")
    with pytest.raises(FileExistsError):
        sink.create("a/one", b"2")
    assert sink.read("a/one") == b"1" and sink.names() == ["a/one"] and sink.names("a/") == ["a/one"]
    with pytest.raises(FileNotFoundError):
        sink.read("a/two")
    memory = ItemMemory(8, DIM)
    write(memory, [1], 1.0)
    publisher = DeltaPublisher(memory, tmp_path)
    publisher.sink = sink
    publisher.epoch = publisher._next_epoch()
    publisher._send_base()
    reader = DeltaSubscriber(tmp_path)
    reader.sink = sink
    write(memory, [2], 2.0)
    publisher.flush()
    reader.poll()
    assert contents(reader.memory) == contents(memory)
    sink.remove("a/one")
    sink.remove("a/one")


def test_a_log_that_was_removed_is_said_so(tmp_path: Path) -> None:
    memory = ItemMemory(8, DIM)
    for _ in range(2):
        publisher = DeltaPublisher(memory, tmp_path / "log")
    reader = DeltaSubscriber(tmp_path / "log")
    reader.poll()
    shutil.rmtree(tmp_path / "log")
    assert reader.poll() == 0 and reader.memory is not None
    publisher = DeltaPublisher(memory, tmp_path / "log")
    assert publisher.epoch == 1
    with pytest.raises(DeltaGap, match="epoch 2 was there and is gone"):
        reader.poll()


@pytest.mark.parametrize(("options", "message"), [
    ({"interval": 0}, "interval must be above 0"), ({"max_rows": 0}, "max_rows"), ({"keep": 0}, "keep"),
    ({"shard": 2, "shards": 2}, r"shard must be in 0..1"), ({"shard": 1, "shards": 2}, "shard 0 takes the next epoch"),
])
def test_bad_settings(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DeltaPublisher(ItemMemory(4, DIM), tmp_path, **options)


def test_an_unknown_scheme_is_named() -> None:
    with pytest.raises(ValueError, match="unknown scheme 'kafka'"):
        DeltaSubscriber("kafka://host/topic")


def test_a_file_is_no_log_and_a_record_to_come_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    for make in (lambda: DeltaPublisher(ItemMemory(4, DIM), tmp_path / "file"),
                 lambda: DeltaSubscriber(tmp_path / "file")):
        with pytest.raises(ValueError, match="is a file; a log of deltas is a folder"):
            make()
    DeltaPublisher(ItemMemory(4, DIM), tmp_path / "log")
    with pytest.raises(DeltaGap, match="has no record 9 yet, its last is 0"):
        memory_at(tmp_path / "log", 1, 9)


def test_a_log_of_another_format_is_refused(tmp_path: Path) -> None:
    DeltaPublisher(ItemMemory(4, DIM), tmp_path)
    path = tmp_path / "00000001" / "epoch.json"
    path.write_text(path.read_text().replace('"format_version": 1', '"format_version": 2'))
    with pytest.raises(ValueError, match="format version 2; this version of semel reads 1"):
        DeltaSubscriber(tmp_path).poll()
    path.write_text("{")
    with pytest.raises(CorruptDelta, match="is damaged"):
        DeltaSubscriber(tmp_path).poll()


def test_a_clock_that_goes_backwards_changes_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = ItemMemory(4, DIM)
    publisher = DeltaPublisher(memory, tmp_path)
    reader = DeltaSubscriber(tmp_path)
    for now in (10**15, 5 * 10**14, 10**14):
        monkeypatch.setattr(time, "time_ns", lambda now=now: now * 1000)
        write(memory, [1, now % 7], float(now))
        publisher.flush()
        reader.poll()
        assert contents(reader.memory) == contents(memory)
        assert reader.memory is not None and int(reader.memory.read([1], now=0)[2][0]) == 0


@pytest.mark.parametrize("seed", range(6))
def test_many_random_deltas(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    memory = ItemMemory(40, DIM, policy="ttl" if seed % 2 else "lru", ttl=3600.0 if seed % 2 else None)
    publisher = DeltaPublisher(memory, tmp_path, snapshot_every=int(random.integers(2, 9)))
    readers = [DeltaSubscriber(tmp_path) for _ in range(3)]
    for step in range(60):
        keys = random.integers(0, 70, random.integers(0, 12))
        memory.write(keys, torch.from_numpy(random.standard_normal((len(keys), DIM)).astype(np.float32)), step)
        if random.random() < 0.3:
            memory.delete(random.integers(0, 70, 4))
        if random.random() < 0.7:
            publisher.flush()
            if random.random() < 0.05:  # a restart, from the same table
                publisher = DeltaPublisher(memory, tmp_path, snapshot_every=int(random.integers(2, 9)))
            for reader in readers:
                if random.random() < 0.5:
                    reader.poll()
                    assert contents(reader.memory) == contents(memory)
            if random.random() < 0.1:
                readers[0] = DeltaSubscriber(tmp_path)
