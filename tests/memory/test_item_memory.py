"""``ItemMemory`` against a dictionary that reads like the policy."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from semel.memory import ItemMemory

DIM = 3


@dataclass
class Oracle:
    """key -> (vector, step, written, tower, last use)."""

    capacity: int
    policy: str
    ttl_us: int | None
    rows: dict[int, tuple] = field(default_factory=dict)
    clock: int = 0

    def write(self, keys: list[int], vectors: np.ndarray, step: int, tower: int, now: int) -> None:
        part = max(1, self.capacity // 4)
        for start in range(0, len(keys), part):
            some = keys[start:start + part]
            new = {key for key in some if key not in self.rows}
            while len(self.rows) + len(new) > self.capacity:
                others = [key for key in self.rows if key not in some]
                del self.rows[min(others, key=lambda key: self.rows[key][4])]
            for key, vector in zip(some, vectors[start:start + part], strict=True):
                self.clock += 1
                self.rows[key] = (vector.tobytes(), step, now, tower, self.clock)

    def touch(self, keys: list[int]) -> None:
        self.clock += 1
        for key in keys:
            if key in self.rows and self.policy == "lru":
                self.rows[key] = (*self.rows[key][:4], self.clock)

    def read(self, key: int, now: int) -> tuple[bytes, bool, int]:
        row = self.rows.get(key)
        if row is None or (self.ttl_us is not None and row[2] + self.ttl_us <= now):
            return np.zeros(DIM, np.float32).tobytes(), False, -1
        return row[0], True, now - row[2]


def contents(memory: ItemMemory) -> dict[int, tuple]:
    rows = memory.rows()
    return {int(k): (v.numpy().tobytes(), int(s), int(w), int(t))
            for k, v, s, w, t in zip(rows.keys, rows.vectors, rows.step, rows.written, rows.tower, strict=True)}


def vectors_for(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, DIM, generator=torch.Generator().manual_seed(seed))


KEYS = st.lists(st.integers(-6, 30) | st.sampled_from([-2**63, 2**63 - 1, 0]), max_size=12)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_it_is_a_dictionary_that_forgets_as_its_policy_says(data: st.DataObject) -> None:
    policy = data.draw(st.sampled_from(["lru", "ttl"]))
    capacity = data.draw(st.integers(1, 20))
    ttl = data.draw(st.sampled_from([5e-6, 40e-6])) if policy == "ttl" else None
    memory = ItemMemory(capacity, DIM, policy, probes=data.draw(st.sampled_from([1, 4, 128])), ttl=ttl)
    oracle = Oracle(capacity, policy, None if ttl is None else round(ttl * 1e6))
    other: dict[int, tuple] = {}
    now = 1000
    for step in range(data.draw(st.integers(1, 14))):
        now += data.draw(st.integers(0, 20))
        keys = data.draw(KEYS)
        action = data.draw(st.sampled_from(["write", "write", "read", "delete", "expire", "save", "changes", "eval"]))
        if action == "write":
            vectors = vectors_for(len(keys), step)
            memory.write(torch.tensor(keys, dtype=torch.int64), vectors, step, tower=step // 3, now=now)
            oracle.write(keys, vectors.numpy(), step, step // 3, now)
        elif action in ("read", "eval"):
            memory.train(action == "read")
            out, hit, age = memory.read(np.array(keys, np.int64), now=now)
            expected = [oracle.read(key, now) for key in keys]
            assert [(v.tobytes(), bool(h), int(a)) for v, h, a in zip(out.numpy(), hit, age, strict=True)] == expected
            if action == "read":
                oracle.touch(keys)
        elif action == "delete":
            assert memory.delete(keys) == len({key for key in keys if oracle.rows.pop(key, None)})
        elif action == "expire" and ttl is not None:
            old = [key for key, row in oracle.rows.items() if row[2] + round(ttl * 1e6) <= now]
            assert memory.expire(now) == len(old)
            for key in old:
                del oracle.rows[key]
        elif action == "save":
            state = load(save(memory.state_dict()))
            memory = ItemMemory(capacity, DIM, policy, ttl=ttl)
            memory.load_state_dict(state)
            other = {}
        elif action == "changes":
            changes = memory.changes()
            gone, written = set(changes.gone.tolist()), set(changes.rows.keys.tolist())
            assert not gone & written
            for key in gone:
                other.pop(key, None)
            for i, key in enumerate(changes.rows.keys.tolist()):
                other[key] = (changes.rows.vectors[i].numpy().tobytes(), int(changes.rows.step[i]),
                              int(changes.rows.written[i]), int(changes.rows.tower[i]))
            assert other == contents(memory)
        assert contents(memory) == {key: row[:4] for key, row in oracle.rows.items()}
        assert len(memory) == len(oracle.rows)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 300))
def test_changes_merged_elsewhere_are_the_same_table(seed: int, capacity: int) -> None:
    random = np.random.default_rng(seed)
    memory, copy_of = ItemMemory(capacity, DIM), ItemMemory(capacity, DIM)
    for step in range(6):
        for _ in range(3):
            keys = random.integers(0, 3 * capacity, random.integers(0, capacity + 1))
            memory.write(keys, vectors_for(len(keys), seed + step), step, now=step)
        memory.delete(random.integers(0, 3 * capacity, 3))
        copy_of.merge(memory.changes())
        assert contents(copy_of) == contents(memory)
        assert copy_of.evicted == 0


def test_many_keys_by_many_threads_are_each_found() -> None:
    memory = ItemMemory(50_000, 8).eval()
    random = np.random.default_rng(0)
    keys = random.permutation(np.arange(-25_000, 25_000) * 7919)
    vectors = torch.randn(50_000, 8)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        memory.write(keys, vectors)
        out = torch.full((60_000, 8), float("nan"))
        asked = np.concatenate([keys, np.arange(10_000) * 7919 + 1])
        got, hit, _ = memory.read(asked, out)
    finally:
        torch.set_num_threads(before)
    assert got is out and torch.equal(out[:50_000], vectors) and not out[50_000:].any()
    assert hit[:50_000].all() and not hit[50_000:].any()


def test_of_a_key_that_comes_twice_the_last_one_stays() -> None:
    memory = ItemMemory(8, DIM)
    vectors = torch.arange(12.0).reshape(4, DIM)
    memory.write([5, 6, 5, 5], vectors)
    assert torch.equal(memory.read([5])[0][0], vectors[3])
    many = ItemMemory(100_000, DIM)
    keys = torch.randint(0, 50, (40_000,))
    vectors = torch.randn(40_000, DIM)
    many.write(keys, vectors)
    last = {int(key): i for i, key in enumerate(keys)}
    assert all(torch.equal(many.read([key])[0][0], vectors[i]) for key, i in last.items())


def test_values_are_kept_bit_for_bit() -> None:
    memory = ItemMemory(4, DIM)
    vectors = torch.tensor([[-0.0, 1e-45, 3.4028235e38], [1 / 3, -1e-38, 0.1]])
    memory.write([1, 2], vectors)
    assert memory.read([1, 2])[0].numpy().tobytes() == vectors.numpy().tobytes()


def test_strings_are_kept_beside_their_ids() -> None:
    memory = ItemMemory(4, DIM)
    memory.write(np.array(["film a", "film b"], object), vectors_for(2, 0))
    rows = memory.rows()
    assert {memory.name_of(key) for key in rows.keys.tolist()} == {"film a", "film b"}
    assert memory.read(["film b"])[1].item()
    memory.delete(["film b"])
    assert {memory.name_of(key) for key in rows.keys.tolist()} == {"film a", None}


def test_two_strings_of_one_id_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("semel.memory.table.stable_id", lambda keys: np.full(len(keys), 7))
    memory = ItemMemory(4, DIM)
    memory.write(["a"], vectors_for(1, 0))
    with pytest.raises(ValueError, match="'a' and 'b' have the same stable id 7"):
        memory.write(["b"], vectors_for(1, 1))


@pytest.mark.parametrize(("keys", "vectors", "message"), [
    ([1, 2], torch.zeros(2, DIM + 1), r"2 keys need vectors \[2, 3\], got \[2, 4\]"),
    ([1, 2], torch.zeros(3, DIM), r"got \[3, 3\]"),
    ([1, 2], torch.zeros(2, DIM, dtype=torch.float64), "must be float32"),
    ([1, 2], torch.tensor([[0.0, 1, 2], [0, float("nan"), 1]]), r"key 2 \(row 1\) holds a NaN"),
    ([1, 2], torch.tensor([[0.0, float("-inf"), 2], [0, 1, 1]]), r"key 1 \(row 0\) holds a NaN or an infinity"),
    ([1.5, 2], torch.zeros(2, DIM), "keys must be integers or strings"),
    ([[1, 2]], torch.zeros(2, DIM), "keys must be a vector"),
    ([1, 2], [[0.0] * DIM] * 2, r"vectors must be a tensor \[N, 3\], got list"),
    (np.array([1, 2**63 + 5], np.uint64), torch.zeros(2, DIM), "does not fit int64"),
])
def test_a_bad_write_changes_nothing(keys: list, vectors: torch.Tensor, message: str) -> None:
    memory = ItemMemory(4, DIM)
    memory.write([9], vectors_for(1, 0))
    before = contents(memory)
    with pytest.raises(ValueError, match=message):
        memory.write(keys, vectors)
    assert contents(memory) == before


@pytest.mark.parametrize(("settings_", "message"), [
    ({"capacity": 0, "dim": 2}, "capacity must be from 1"),
    ({"capacity": 4, "dim": 0}, "dim must be from 1"),
    ({"capacity": 4, "dim": 2, "policy": "fifo"}, 'policy must be "lru" or "ttl"'),
    ({"capacity": 4, "dim": 2, "policy": "ttl"}, "needs ttl"),
    ({"capacity": 4, "dim": 2, "ttl": 3.0}, "takes none"),
    ({"capacity": 4, "dim": 2, "policy": "ttl", "ttl": -1.0}, "above 0"),
    ({"capacity": 4, "dim": 2, "probes": 0}, "probes must be from 1"),
])
def test_impossible_settings(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ItemMemory(**settings_)


def test_an_out_that_does_not_fit_is_refused() -> None:
    memory = ItemMemory(4, DIM)
    for out in (torch.zeros(2, DIM), torch.zeros(1, DIM, dtype=torch.float64), torch.zeros(DIM, 1).T[:, :DIM]):
        if tuple(out.shape) == (1, DIM) and out.is_contiguous() and out.dtype == torch.float32:
            continue
        with pytest.raises(ValueError, match="out must be contiguous float32"):
            memory.read([1], out)


def test_a_table_too_small_says_how_large_it_should_be() -> None:
    memory = ItemMemory(100, DIM)
    random = np.random.default_rng(0)
    with pytest.warns(UserWarning, match="rows are too few for about") as caught:
        for _ in range(40):
            keys = random.integers(0, 1000, 50)
            memory.read(keys)
            memory.write(keys, torch.zeros(50, DIM))
    asked = int(str(caught[-1].message).split("capacity=")[1].split()[0])
    assert 500 < asked < 1500
    enough = ItemMemory(1000, DIM)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(40):
            keys = random.integers(0, 1000, 50)
            enough.read(keys)
            enough.write(keys, torch.zeros(50, DIM))


def test_a_state_of_another_width_or_size_is_refused() -> None:
    memory = ItemMemory(4, DIM)
    memory.write([1, 2, 3], vectors_for(3, 0))
    with pytest.raises(RuntimeError, match="this memory is 2 wide"):
        ItemMemory(4, 2).load_state_dict(memory.state_dict())
    with pytest.raises(RuntimeError, match="3 rows do not fit a memory of 2"):
        ItemMemory(2, DIM).load_state_dict(memory.state_dict())
    with pytest.raises(RuntimeError, match="vectors"):
        ItemMemory(4, DIM).load_state_dict({})


def test_copies_are_independent() -> None:
    memory = ItemMemory(4, DIM)
    memory.write([1], vectors_for(1, 0))
    other = copy.deepcopy(memory)
    other.write([1], vectors_for(1, 1))
    assert torch.equal(memory.read([1])[0], vectors_for(1, 0)) and torch.equal(other.read([1])[0], vectors_for(1, 1))
