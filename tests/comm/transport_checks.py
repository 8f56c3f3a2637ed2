"""What the processes of ``test_transports`` run."""

import threading
import time
import traceback

import numpy as np
import torch

from semel.batch import Jagged, Pointers, RequestRows
from semel.comm import Collective, Staged, Throttled, exchange_counts, join, own_group
from semel.comm.transport import transport
from semel.training.exchange import Exchange

DTYPES = (torch.bool, torch.int32, torch.int64, torch.float64, torch.bfloat16)
TAILS = ((), (2, 3), (0,))
TRANSPORTS = ("auto", "collective", "staged", "staged in chunks of 3 bytes", "throttled")


def open_transport(name):
    if name.endswith("on cuda"):
        return Staged(device="cuda", chunk_bytes=1000)
    if name == "throttled":
        return Throttled(transport(), 1e9, 1e-4)
    if name.startswith("staged in"):
        return Staged(chunk_bytes=3)
    return transport(name)


def drawn(world, dtype, tail, seed):
    """The same on every rank: how many rows each sends to each, and the rows."""
    random = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 4, (world, world), generator=random)
    counts[torch.rand(world, world, generator=random) < 0.3] = 0
    values = [torch.randint(0, 99, (int(counts[s].sum()), *tail), generator=random).to(dtype) for s in range(world)]
    return counts, values


def equal_exchange(name):
    """All-to-alls and all-gathers of all types and shapes, several under way and waited for in another order."""
    t, device = open_transport(name), "cuda" if name.endswith("on cuda") else "cpu"
    for seed, (dtype, tail) in enumerate((d, t) for d in DTYPES for t in TAILS):
        under_way = []
        for more in range(2):
            counts, values = drawn(t.world_size, dtype, tail, 10 * seed + more)
            values = [part.to(device) for part in values]
            send, receive = counts[t.rank].tolist(), counts[:, t.rank].tolist()
            if more == 0 and device == "cpu":
                assert exchange_counts(t, send) == receive
            expected = torch.cat([values[s].split(counts[s].tolist())[t.rank] for s in range(t.world_size)])
            under_way.append((t.all_to_all(values[t.rank], send, receive), expected))
            same = [v[:1] if len(v) else torch.ones(1, *tail, device=device).to(dtype) for v in values]
            under_way.append((t.all_gather(same[t.rank]), torch.stack(same)))
        for handle, expected in reversed(under_way):
            got = handle.wait()
            assert got.dtype == dtype and torch.equal(got, expected), (dtype, tail)
            assert handle.wait() is got
    none = [0] * t.world_size
    assert t.all_to_all(torch.empty(0, 5, device=device), none, none).wait().shape == (0, 5)
    grad = torch.ones(t.world_size, requires_grad=True, device=device)
    assert not t.all_to_all(grad, [1] * t.world_size, [1] * t.world_size).wait().requires_grad


def large_exchange(name):
    """More than a chunk, from everybody to everybody but not evenly."""
    t = open_transport(name)
    rows = [(1 << 18) * (r + 1) for r in range(t.world_size)]
    values = torch.arange(sum(rows)) + 1000 * t.rank
    got = t.all_to_all(values, rows, [rows[t.rank]] * t.world_size).wait()
    start = sum(rows[: t.rank])
    assert torch.equal(got, torch.cat([torch.arange(start, start + rows[t.rank]) + 1000 * s
                                       for s in range(t.world_size)]))


def two_threads_with_a_transport_each():
    """One calls often, one seldom, in no order between them: they never meet."""
    ours, theirs = transport(), transport("staged")
    errors = []

    def often():
        try:
            for n in range(20):
                assert theirs.all_gather(torch.tensor([n])).wait().flatten().tolist() == [n] * theirs.world_size
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=often)
    thread.start()
    for n in range(5):
        time.sleep(0.001 * (ours.rank + 1))
        assert ours.all_gather(torch.tensor([-n])).wait().flatten().tolist() == [-n] * ours.world_size
    thread.join(30)
    assert not thread.is_alive() and not errors, errors


def groups_of_some():
    """Ranks 0 and 1, and rank 2 alone: each group exchanges within itself."""
    rank = join().rank
    members = [0, 1] if rank < 2 else [2]
    for t in (Collective(own_group(members, backend="gloo")), Staged(own_group(members, backend="gloo")),
              transport("staged", own_group(members))):
        assert (t.rank, t.world_size) == (members.index(rank), len(members))
        assert t.all_gather(torch.tensor(rank)).wait().tolist() == members


def throttled_link():
    """A call takes latency + bytes / bandwidth, calls queue, and the caller computes meanwhile."""
    t = Throttled(transport(), 1e6, 0.01)
    t.all_gather(torch.ones(1)).wait()
    values, each = torch.zeros(20_000 * t.world_size, dtype=torch.uint8), [20_000] * t.world_size
    begun = time.perf_counter()
    handles = [t.all_to_all(values, each, each) for _ in range(3)]
    asked = time.perf_counter() - begun
    for handle in handles:
        handle.wait()
    took, expected = time.perf_counter() - begun, 3 * (0.01 + 20_000 * (t.world_size - 1) / 1e6)
    assert asked < expected / 3
    assert expected <= took < expected + 2  # the machine may be busy
    busy = t.busy_s
    t.all_to_all(values, *([[0] * t.rank + [len(values)] + [0] * (t.world_size - t.rank - 1)] * 2)).wait()
    assert abs(t.busy_s - busy - 0.01) < 1e-6  # rows that stay cost nothing


def exchange_with_uneven_data():
    """Ranks with 0, 1 and 3 batches go the same number of steps and see every request once."""
    def rows(rank, batch):
        ids = [f"{rank}-{batch}-{i}" for i in range(4)]
        return RequestRows(np.array(ids, object), Pointers(np.array(ids, object), np.arange(4), np.zeros(4, int)),
                           np.arange(4), {"x": np.arange(4.0)}, Jagged.from_rows([[1], [2, 3], [], [4]]), {}, {})

    def deal(costs, world_size, *, tokens=None, token_cap=None):
        return np.arange(len(costs)) % world_size

    t = transport()
    exchange = Exchange(t, deal, lambda lengths, candidates: lengths + candidates, lengths=lambda r: r.pointers.as_of)
    steps = list(exchange.balanced([rows(t.rank, i) for i in range((0, 1, 3)[t.rank])]))
    return [sorted(step.request_id) for step in steps]


def run_all(names):
    """Each check by name -> its result, or the trace of what it raised."""
    join()
    out = {}
    for name in names:
        check, _, argument = name.partition(":")
        try:
            out[name] = "", globals()[check](*([argument] if argument else []))
        except Exception:
            out[name] = traceback.format_exc(), None
    return out
