"""Promise 6: base snapshot + deltas = the trainer's table, bit for bit; a duplicate is ignored, a gap is refused."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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

DIM, CAPACITY = 3, 24
Table = dict[int, tuple[bytes, int, int, int]]


def contents(memory: ItemMemory) -> Table:
    rows = memory.rows()
    return {int(k): (v.numpy().tobytes(), int(s), int(w), int(t))
            for k, v, s, w, t in zip(rows.keys, rows.vectors, rows.step, rows.written, rows.tower, strict=True)}


class NoAnswer:
    """A sink of which some calls fail, before or after they did what was asked; and which delivers late."""

    def __init__(self, sink, random: np.random.Generator, rate: float) -> None:
        self.sink, self.random, self.rate, self.url = sink, random, rate, sink.url

    def create(self, name: str, content: bytes) -> None:
        fate = self.random.random()
        if fate < self.rate / 2:
            raise OSError("no answer")
        self.sink.create(name, content)
        if fate < self.rate:
            raise OSError("no answer")

    def read(self, name: str) -> bytes:
        if self.random.random() < self.rate:
            raise OSError("no answer")
        return self.sink.read(name)

    def names(self, prefix: str = "") -> list[str]:
        found = self.sink.names(prefix)
        if self.random.random() < self.rate and found:
            keep = self.random.random(len(found)) > 0.2  # a listing in any order, that lacks some
            found = [name for name, kept in zip(found, keep, strict=True) if kept or name.endswith("json")]
            self.random.shuffle(found)
        return found

    def remove(self, name: str) -> None:
        self.sink.remove(name)


def run(folder: Path, seed: int, steps: int) -> None:
    random = np.random.default_rng(seed)
    rate = float(random.choice([0.0, 0.1, 0.4]))
    options = {"snapshot_every": int(random.integers(2, 12)), "keep": int(random.integers(1, 4))}
    memory = ItemMemory(CAPACITY, DIM)

    def publisher_of(table: ItemMemory) -> DeltaPublisher:
        new = DeltaPublisher(table, folder, **options)
        new.sink = NoAnswer(new.sink, random, rate)
        return new

    def reader() -> DeltaSubscriber:
        new = DeltaSubscriber(folder)
        new.sink = NoAnswer(new.sink, random, rate)
        return new

    publisher = publisher_of(memory)
    fenced: list[DeltaPublisher] = []
    readers = [reader() for _ in range(3)]
    truth: dict[Position, Table] = {Position(1, 0): contents(memory)}
    last_checkpoint = {name: value.clone() for name, value in memory.state_dict().items()}
    for step in range(steps):
        keys = random.integers(0, 3 * CAPACITY, random.integers(0, 10))
        memory.write(keys, torch.from_numpy(random.standard_normal((len(keys), DIM)).astype(np.float32)), step)
        if random.random() < 0.2:
            memory.delete(random.integers(0, 3 * CAPACITY, 5))
        if random.random() < 0.05:
            last_checkpoint = {name: value.clone() for name, value in memory.state_dict().items()}
        if random.random() < 0.6:
            before = publisher.sequence
            seen = contents(memory)
            try:
                publisher.flush()
            except OSError:
                pass
            if publisher.sequence > before:
                truth[Position(publisher.epoch, publisher.sequence)] = seen
        if random.random() < 0.04:  # the trainer dies and comes back from its checkpoint, or as it was
            fenced.append(publisher)
            if random.random() < 0.5:
                memory = ItemMemory(CAPACITY, DIM)
                memory.load_state_dict(last_checkpoint)
            publisher = publisher_of(memory)
            truth[Position(publisher.epoch, 0)] = contents(memory)
        for old in fenced:
            if random.random() < 0.05:
                old.memory.write([1], torch.ones(1, DIM))
                with pytest.raises((Fenced, OSError)):
                    old.flush()
                    raise OSError("a listing that lacked the newer epoch cannot stop it")
        for i, one in enumerate(readers):
            if random.random() < 0.5:
                try:
                    one.poll()
                except (OSError, DeltaGap, CorruptDelta):
                    pass
                if random.random() < 0.05:
                    readers[i] = reader()
                elif one.position is not None and one.position in truth:
                    assert one.memory is not None and contents(one.memory) == truth[one.position]
                elif one.position is not None:  # only a publisher that was fenced wrote what nobody else knows
                    assert any(old.epoch == one.position.epoch for old in fenced)
    for one in (publisher, *readers):
        one.sink = one.sink.sink  # everything answers in the end
    publisher.flush()
    memory.write([0], torch.zeros(1, DIM), steps)
    publisher.flush()
    for one in readers:
        try:
            one.poll()
        except DeltaGap:
            pytest.fail("a log of which nothing was removed has no gap")
        assert one.position == Position(publisher.epoch, publisher.sequence)
        assert one.memory is not None and contents(one.memory) == contents(memory)
        assert one.poll() == 0  # a duplicate delivery changes nothing
        assert contents(memory_at(folder, publisher.epoch, publisher.sequence)) == contents(memory)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_a_reader_has_the_trainers_table_or_an_earlier_one_of_it(seed: int) -> None:
    folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        run(folder, seed, 60)
    finally:
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_thousand_deltas() -> None:
    for seed in range(30):
        folder = Path(tempfile.mkdtemp(dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        try:
            run(folder, seed, 600)
        finally:
            shutil.rmtree(folder)
