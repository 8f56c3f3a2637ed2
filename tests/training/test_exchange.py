"""Exchange of whole requests: every one arrives once, bit for bit, where the partition says, in order."""

import threading

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, JaggedTable, Pointers, RequestBatch, RequestRows, offsets_of
from semel.comm import Alone, run_threads
from semel.examples import materialize
from semel.examples.rows import concat_rows
from semel.features import Feature, FeatureSpec
from semel.history import EventSchema, HistoryStore, Projection
from semel.training.exchange import Exchange, history_lengths
from semel.training.packing import pack, unpack

TEXTS = ["", "a", "zürich", "ab\0c", "\0", "日本", "x" * 300]


def cost(lengths, candidates):
    return lengths + 1e-3 * lengths**2 + 10.0 * candidates


def zigzag(costs, world_size, *, tokens=None, token_cap=None):
    """Equal counts: the costliest first, dealt forth and back."""
    ranks = np.empty(len(costs), np.int64)
    place = np.arange(len(costs)) % (2 * world_size)
    ranks[np.argsort(-costs, kind="stable")] = np.minimum(place, 2 * world_size - 1 - place)
    return ranks


def by_length(rows):
    return rows.pointers.as_of % 1000


def make_rows(count, seed=0, strings=True, weights=True, nulls=True):
    random = np.random.default_rng([seed, count])

    def texts(n, null=False):
        out = random.choice(np.array(TEXTS, object), n)
        if null and n:
            out[random.random(n) < 0.3] = None
        return out

    sizes = random.integers(0, 5, count)
    total = int(sizes.sum())
    mixed = np.empty(count, object)
    mixed[:] = [[1, None, "1", 2.5, True, float("nan"), 1 << 70][i] for i in random.integers(0, 7, count)]
    return RequestRows(
        np.array([f"{seed}-{i}" for i in range(count)], object),
        Pointers(texts(count) if strings else random.integers(-9, 9, count), random.integers(0, 1 << 60, count),
                 random.integers(0, 99, count)),
        random.integers(0, 1 << 40, count),
        {"f": random.integers(0, 1 << 62, count).view(np.float64), "b": random.random(count) < 0.5,
         "s": texts(count, nulls), "mixed": mixed, "u": np.array(["ab", "c"])[random.integers(0, 2, count)],
         "when": random.integers(0, 99, count).astype("datetime64[s]"), "small": random.integers(0, 9, count, np.int8)},
        Jagged(texts(total) if strings else random.integers(0, 1 << 60, total), offsets_of(sizes)),
        {"like": random.random(total, np.float32)}, {"like": random.random(total) < 0.5},
        random.random(total, np.float32) if weights else None)


def assert_equal_rows(a, b):
    ours, theirs = as_arrays(a), as_arrays(b)
    assert ours.keys() == theirs.keys()
    for name, values in ours.items():
        other = theirs[name]
        assert len(values) == len(other) and values.dtype.kind == other.dtype.kind, name
        if values.dtype == object:
            assert [(type(x), repr(x)) for x in values] == [(type(x), repr(x)) for x in other], name
        else:
            assert values.astype(other.dtype).tobytes() == other.tobytes(), name


def as_arrays(rows):
    return {"request_id": rows.request_id, "user": rows.pointers.user_id, "as_of": rows.pointers.as_of,
            "version": rows.pointers.version, "catalogue": rows.catalogue_version, "offsets": rows.candidates.offsets,
            "items": rows.candidates.values, **rows.context, **{f"l.{n}": v for n, v in rows.label.items()},
            **{f"m.{n}": v for n, v in rows.label_mask.items()},
            **({} if rows.weight is None else {"weight": rows.weight})}


def exchange_all(parts, partition=zigzag, times=1):
    """What each rank gets when each brings one of ``parts``, and its pending."""
    def rank(transport):
        exchange = Exchange(transport, partition, cost, lengths=by_length)
        pendings = [exchange.start(parts[transport.rank]) for _ in range(times)]
        rows = [pending.wait() for pending in pendings]
        exchange.close()
        return rows[-1], pendings[-1]

    return run_threads(len(parts), rank)


@settings(max_examples=40, deadline=None)
@given(counts=st.lists(st.integers(0, 6), min_size=1, max_size=4), strings=st.booleans(), weights=st.booleans(),
       seed=st.integers(0, 99))
def test_every_request_arrives_once_bit_for_bit_in_order(counts, strings, weights, seed):
    parts = [make_rows(count, seed + i, strings, weights) for i, count in enumerate(counts)]
    everything = concat_rows(parts)
    ranks = zigzag(cost(by_length(everything), everything.candidates.lengths), len(parts))
    got = exchange_all(parts)
    for rank, (rows, _) in enumerate(got):
        assert_equal_rows(rows, everything.select(np.flatnonzero(ranks == rank)))
    report = got[0][1].report
    source = np.repeat(np.arange(len(parts)), counts)
    assert report.requests == sum(counts) and report.moved == (ranks != source).sum()
    assert all(pending.report == report for _, pending in got)
    assert (report.moved_bytes > 0) == (report.moved > 0)


def test_columns_that_are_null_on_one_rank_only():
    parts = [make_rows(4, 1, nulls=False), make_rows(4, 2)]
    parts[0].context["mixed"] = np.arange(4)                      # integers here, objects there
    parts[1] = RequestRows(**{**vars(parts[1]), "weight": None})  # a weight of 1, then
    ranks = zigzag(cost(by_length(concat_rows(parts)), concat_rows(parts).candidates.lengths), 2)
    for rank, (rows, _) in enumerate(exchange_all(parts)):
        assert_equal_rows(rows, concat_rows(parts).select(np.flatnonzero(ranks == rank)))


def test_ranks_without_requests_get_some_and_some_get_none():
    rows = make_rows(6)
    got = exchange_all([rows, None, None])
    assert [len(r) for r, _ in got] == [2, 2, 2]
    everything_to_last = exchange_all([rows, None, make_rows(0)],
                                      lambda costs, world, *, tokens=None, token_cap=None: np.full(len(costs), 2))
    assert [len(r) for r, _ in everything_to_last] == [0, 0, 6]
    assert_equal_rows(everything_to_last[2][0], rows)
    assert_equal_rows(everything_to_last[1][0], rows.select(np.arange(0)))
    assert [(r, pending.done) for r, pending in exchange_all([None, None])] == [(None, True)] * 2


def test_reports_idle_and_reads():
    rows = make_rows(8, strings=False)
    length = np.array([900, 10, 10, 10, 10, 10, 10, 10])
    rows.pointers.as_of[:] = length
    rows.pointers.user_id[:] = [1, 1, 1, 1, 2, 2, 2, 2]
    parts = [rows.select(np.arange(4)), rows.select(np.arange(4, 8))]
    reports = [pending.report for _, pending in exchange_all(parts)]
    costs = cost(length, rows.candidates.lengths)
    assert reports[0].idle_before == pytest.approx(1 - costs.sum() / 2 / max(costs[:4].sum(), costs[4:].sum()))
    ranks = zigzag(costs, 2)
    assert reports[0].idle_after == pytest.approx(1 - costs.sum() / 2 / max(costs[ranks == r].sum() for r in (0, 1)))
    assert reports[0].reads_before == 2
    assert reports[0].reads_after == len(set(zip(ranks.tolist(), rows.pointers.user_id.tolist(), strict=True))) == 4
    tokens = length + rows.candidates.lengths
    assert reports[0].peak_tokens == max(tokens[ranks == r].sum() for r in (0, 1))


@pytest.mark.parametrize("strings", [True, False])
def test_users_together(strings):
    """All requests of a user go to one rank, wherever they lay; the partition weighs them as one."""
    parts = [make_rows(7, seed, strings) for seed in range(3)]
    seen = []

    def partition(costs, world_size, *, home, tokens=None, token_cap=None):
        seen.append((costs.sum(), len(costs), tokens.sum(), home))
        return zigzag(costs, world_size)

    def rank(transport):
        exchange = Exchange(transport, partition, cost, lengths=by_length, users_together=True)
        return exchange.start(parts[transport.rank]).wait()

    got = run_threads(3, rank)
    everything = concat_rows(parts)
    users = [set(rows.pointers.user_id.tolist()) for rows in got]
    assert sum(map(len, users)) == len(set.union(*users)) == len(set(everything.pointers.user_id.tolist()))
    assert sorted(i for rows in got for i in rows.request_id) == sorted(everything.request_id)
    total, units, tokens, home = seen[0]
    assert total == pytest.approx(cost(by_length(everything), everything.candidates.lengths).sum())
    assert units == len(home) == sum(map(len, users))
    assert tokens == (by_length(everything) + everything.candidates.lengths).sum()


def test_a_partition_may_ask_where_requests_lie():
    def stay(costs, world_size, home, *, tokens=None, token_cap=None):
        return home

    parts = [make_rows(count, count) for count in (3, 0, 2)]
    for rank, (rows, pending) in enumerate(exchange_all(parts, stay)):
        assert_equal_rows(rows, parts[rank])
        assert pending.report.moved == pending.report.moved_bytes == 0


def test_partition_sees_costs_tokens_and_cap_and_must_name_ranks():
    seen = []

    def partition(costs, world_size, *, tokens=None, token_cap=None):
        seen.append((costs, world_size, tokens, token_cap))
        return np.zeros(len(costs), np.int64)

    rows = make_rows(3)
    Exchange(Alone(), partition, cost, 77, lengths=by_length).start(rows).wait()
    (costs, world_size, tokens, cap), = seen
    assert world_size == 1 and cap == 77
    assert tokens.tolist() == (by_length(rows) + rows.candidates.lengths).tolist()
    assert costs.tolist() == cost(by_length(rows), rows.candidates.lengths).tolist()
    for wrong in (np.array([0, 1, 0]), np.zeros(2, int), np.zeros(3), np.array([0, -1, 0])):
        with pytest.raises(ValueError, match="partition of 3 requests over 1 ranks gave"):
            Exchange(Alone(), lambda *_, wrong=wrong, **__: wrong, cost, lengths=by_length).start(rows).wait()


def test_balanced_goes_on_until_the_last_rank_is_at_its_end():
    """Ranks with 0, 1 and 4 batches make the same number of steps, see every request once, and end together."""
    batches = [[make_rows(3, 100 * rank + i) for i in range(count)] for rank, count in enumerate((0, 1, 4))]

    def rank(transport):
        exchange = Exchange(transport, zigzag, cost, lengths=by_length)
        return [rows for rows in exchange.balanced(batches[transport.rank])]

    steps = run_threads(3, rank)
    assert [len(s) for s in steps] == [4, 4, 4]
    assert [[len(rows) for rows in s] for s in zip(*steps, strict=True)] == [[2, 2, 2], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    seen = sorted(i for s in steps for rows in s for i in rows.request_id)
    assert seen == sorted(i for of_rank in batches for rows in of_rank for i in rows.request_id)


@settings(max_examples=15, deadline=None)
@given(counts=st.lists(st.lists(st.integers(0, 4), max_size=4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_any_uneven_data_goes_through(counts, seed):
    """``counts``: requests of each batch of each rank. Step i of all ranks together is batch i of all ranks."""
    batches = [[make_rows(count, 1000 * seed + 10 * rank + i) for i, count in enumerate(of_rank)]
               for rank, of_rank in enumerate(counts)]
    steps = run_threads(len(counts), lambda transport: list(
        Exchange(transport, zigzag, cost, lengths=by_length).balanced(batches[transport.rank])))
    assert {len(of_rank) for of_rank in steps} == {max(map(len, counts))}
    for i, of_step in enumerate(zip(*steps, strict=True)):
        everything = concat_rows([of_rank[i] for of_rank in batches if i < len(of_rank)])
        ranks = zigzag(cost(by_length(everything), everything.candidates.lengths), len(counts))
        for rank, rows in enumerate(of_step):
            assert_equal_rows(rows, everything.select(np.flatnonzero(ranks == rank)))


def test_the_next_batch_is_exchanged_while_the_caller_computes():
    started, computing = threading.Event(), threading.Event()

    def slow_lengths(rows):
        if rows.request_id[0].startswith("2-"):
            assert computing.wait(20)  # the caller must go on before the second exchange is over
            started.set()
        return by_length(rows)

    exchange = Exchange(Alone(), zigzag, cost, lengths=slow_lengths)
    steps = exchange.balanced([make_rows(2, 1), make_rows(2, 2)])
    next(steps)
    computing.set()
    assert started.wait(20)
    assert len(next(steps)) == 2 and next(steps, None) is None


def test_an_error_of_one_rank_is_raised_on_all():
    bad = make_rows(3)
    bad.context["mixed"][:] = [b"bytes", 1, 2]
    told = []

    def rank(transport):
        exchange = Exchange(transport, zigzag, cost, lengths=by_length)
        try:
            exchange.start(bad if transport.rank == 1 else make_rows(2)).wait()
        except ValueError as error:
            told.append((transport.rank, str(error)))

    run_threads(3, rank)
    told = dict(told)
    assert "column 'context.mixed' holds a bytes" in told[1]
    assert all("rank 1 of 3 could not prepare its requests" in told[r] for r in (0, 2))


def test_errors_name_what_is_missing():
    with pytest.raises(ValueError, match="give Exchange lengths=history_lengths"):
        Exchange(Alone(), zigzag, cost).start(make_rows(2)).wait()
    with pytest.raises(ValueError, match="cost must give a finite number"):
        Exchange(Alone(), zigzag, lambda lengths, candidates: lengths * np.nan, lengths=by_length
                 ).start(make_rows(2)).wait()
    with pytest.raises(ValueError, match="different context columns"):
        more = make_rows(2, 5)
        more.context["more"] = np.arange(2)
        exchange_all([make_rows(2), more])


def make_batch(requests, seed=0):
    random = np.random.default_rng([seed, requests])
    lengths, sizes = random.integers(0, 9, requests), random.integers(0, 4, requests)
    events, total = int(lengths.sum()), int(sizes.sum())
    many = random.integers(0, 3, total)
    users = random.integers(0, 9, requests)
    return RequestBatch(
        np.array([f"{seed}-{i}" for i in range(requests)], object),
        {"user_id": torch.from_numpy(users), "age": torch.from_numpy(random.random(requests, np.float32)),
         "half": torch.from_numpy(random.random((requests, 3))).to(torch.bfloat16),
         "tags": Jagged(torch.arange(events), torch.from_numpy(offsets_of(lengths))),
         "history": JaggedTable({"event_time": torch.from_numpy(random.integers(0, 1 << 60, events)),
                                 "vector": torch.from_numpy(random.random((events, 2), np.float32))},
                                torch.from_numpy(offsets_of(lengths)),
                                {"vector": torch.from_numpy(random.random(events) < 0.5)}, None,
                                torch.from_numpy(random.integers(0, 3, requests).astype(np.uint8)))},
        {"item_id": torch.from_numpy(random.integers(0, 1 << 60, total)),
         "genres": Jagged(random.integers(0, 99, int(many.sum())), offsets_of(many)).torch()},
        torch.from_numpy(offsets_of(sizes)), {"like": torch.from_numpy(random.random(total, np.float32))},
        {"like": torch.from_numpy(random.random(total) < 0.5)}, None, Pointers(users, users * 2, users * 3))


def leaves(batch, rows):
    """The values of some requests, in order, each request by ``slice``."""
    out = []
    for row in rows:
        one = batch.slice(row, row + 1)
        table = one.request["history"]
        out.append([one.request_id.tolist(), *(one.request[name].tolist() for name in ("user_id", "age", "half")),
                    one.request["tags"].values.tolist(), *(c.tolist() for c in table.columns.values()),
                    table.validity["vector"].tolist(), table.status.tolist(), one.candidate["item_id"].tolist(),
                    one.candidate["genres"].values[int(one.candidate["genres"].offsets[0]):].tolist(),
                    one.candidate["genres"].lengths.tolist(), one.label["like"].tolist(),
                    one.label_mask["like"].tolist(), one.pointers.as_of.tolist()])
    return out


def test_materialized_batches_arrive_bit_for_bit():
    parts = [make_batch(count, count) for count in (5, 0, 3)]
    source = [(part, row) for part in parts for row in range(part.requests)]
    lengths = np.concatenate([part.request["history"].lengths.numpy() for part in parts])
    candidates = np.concatenate([np.diff(part.candidate_offsets.numpy()) for part in parts])
    ranks = zigzag(cost(lengths, candidates), 3)
    for rank, (batch, _) in enumerate(exchange_all(parts)):
        expected = [leaves(*source[i][:1], [source[i][1]])[0] for i in np.flatnonzero(ranks == rank)]
        assert leaves(batch, range(batch.requests)) == expected
        assert batch.request["half"].dtype == torch.bfloat16 and batch.request["half"].shape[1:] == (3,)
        assert batch.request["history"].columns["vector"].dtype == torch.float32
        assert batch.weight is None and batch.label_mask["like"].dtype == torch.bool


def test_batches_of_other_columns_are_refused():
    other = make_batch(4, 1)
    other.request["age"] = other.request["age"].double()
    with pytest.raises(ValueError, match=r"different columns or types: request.age"):
        exchange_all([make_batch(4), other])
    coded = make_batch(2)
    table = coded.request["history"]
    coded.request["history"] = JaggedTable(table.columns, table.offsets, None, {"event_time": np.array(["x"], object)})
    with pytest.raises(ValueError, match="holds codes of dictionaries"):
        pack(coded)


def test_packing_comes_back():
    for count in (0, 1, 9):
        rows = make_rows(count)
        packed = pack(rows)
        assert_equal_rows(unpack(packed.layout, packed.values, packed.offsets), rows)


def test_pointers_and_histories_give_the_same_batches(tmp_path):
    """Exchanged and then materialized, or the other way round: every rank gets the same bits, those of the whole
    global batch that the partition gives it."""
    random = np.random.default_rng(0)
    user = random.permutation(np.repeat(np.arange(12), random.integers(0, 40, 12)))
    schema = EventSchema({"item_id": pa.int64(), "seen": pa.float32()})
    store = HistoryStore.create(tmp_path / "store", schema, shards=2)
    store.append(pa.table({"user_id": user, "event_time": np.arange(len(user)),
                           "item_id": random.integers(0, 99, len(user)), "seen": random.random(len(user), np.float32)}))
    features = FeatureSpec(history=(Feature("item_id"), Feature("seen", "numeric")), history_last=16)
    users = random.integers(0, 14, 20)
    rows = RequestRows(np.array([f"{i}" for i in range(20)], object),
                       Pointers(users, random.integers(0, len(user) + 1, 20), np.array(store.version)),
                       np.zeros(20, np.int64), {}, Jagged(np.arange(40), np.arange(0, 41, 2)),
                       {"like": np.ones(40, np.float32)}, {"like": np.ones(40, bool)})
    lengths = history_lengths(store, Projection(("event_time",), last=16))
    ranks = zigzag(cost(lengths(rows), rows.candidates.lengths), 3)

    def rank(transport):
        part = rows.select(np.array_split(np.arange(20), 3)[transport.rank])
        exchange = Exchange(transport, zigzag, cost, lengths=lengths)
        moved = materialize(exchange.start(part).wait(), store, None, features)
        carried = exchange.start(materialize(part, store, None, features)).wait()
        return moved, carried, materialize(rows.select(np.flatnonzero(ranks == transport.rank)), store, None, features)

    for moved, carried, plain in run_threads(3, rank):
        for batch in (moved, carried):
            assert batch.request_id.tolist() == plain.request_id.tolist()
            assert batch.request["history"].columns.keys() == plain.request["history"].columns.keys()
            for name, column in plain.request["history"].columns.items():
                assert torch.equal(batch.request["history"].columns[name], column)
            assert torch.equal(batch.request["history"].offsets, plain.request["history"].offsets)
            assert torch.equal(batch.candidate["item_id"], plain.candidate["item_id"])
            assert torch.equal(batch.candidate_offsets, plain.candidate_offsets)
            assert torch.equal(batch.label["like"], plain.label["like"])
    assert len(set(lengths(rows))) > 5
