"""Fast jagged attention against its plain form: outputs and all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.models import attention, attention_chunks, reference, time_bias

TOLERANCE = 1e-10  # float64


def by_chunks(q, k, v, plan, *, weighting, scale, norm=1.0, position_bias=None, time_bias=None, own_k=None, own_v=None):
    """What devices other than a CPU run."""
    inputs = [q.new_empty(0) if x is None else x for x in (own_k, own_v, position_bias, time_bias)]
    return attention_chunks.ChunksAttention.apply(q, k, v, *inputs, plan.chunks, weighting, scale, norm)


ways = pytest.mark.parametrize("attend", [attention.jagged_attention, by_chunks], ids=["rows", "chunks"])


def offsets(lengths):
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64).cumsum(0)])


def draw(generator, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@ways
@settings(max_examples=60, deadline=None)
@given(queries=lengths, keys=lengths, causal=st.booleans(), weighting=st.sampled_from(["silu", "softmax"]),
       own=st.booleans(), bias=st.booleans(), chunk=st.sampled_from([1, 30, 1 << 18]), seed=st.integers(0, 99),
       window=st.sampled_from([None, None, 1, 2, 4, 20]), prefix=st.integers(0, 5), times=st.sampled_from([2, 10**13]))
def test_equals_the_plain_form(attend, queries, keys, causal, weighting, own, bias, chunk, seed, window, prefix, times):
    rows = min(len(queries), len(keys))
    query_offsets = offsets(queries[:rows])
    key_offsets = query_offsets if causal else offsets(keys[:rows])
    if weighting == "softmax" and not own and not causal and any(
        n and not m for n, m in zip(queries[:rows], keys[:rows], strict=True)
    ):
        own = True  # a softmax over nothing is not defined
    g = torch.Generator().manual_seed(seed)
    t, s = int(query_offsets[-1]), int(key_offsets[-1])
    q, k, v = draw(g, t, 2, 3), draw(g, s, 2, 3), draw(g, s, 2, 3)
    biases = {"position_bias": draw(g, 5), "time_bias": draw(g, time_bias.TIME_BUCKETS)} if bias else {}
    own_tokens = {"own_k": draw(g, t, 2, 3), "own_v": draw(g, t, 2, 3)} if own and not causal else {}
    query_time = torch.randint(0, times, (t,), generator=g) * (10**13 // times)  # few of them: the same for neighbours
    key_time = query_time if causal else torch.randint(0, 10**13, (s,), generator=g)
    times = {"query_time": query_time, "key_time": key_time}
    how = {"weighting": weighting, "scale": 0.7, "norm": 3.0}
    saved, attention_chunks.CHUNK_SCORES = attention_chunks.CHUNK_SCORES, chunk
    try:
        plan = attention.AttentionPlan(query_offsets, key_offsets, causal=causal, positions=5 if bias else 0, **times,
                                       window=window, prefix=prefix)
        fast = attend(q, k, v, plan, **how, **biases, **own_tokens)
        plain = reference.jagged_attention(q, k, v, query_offsets, key_offsets, causal=causal, **how, **times, **biases,
                                           **own_tokens, window=window, prefix=prefix)
        assert fast.shape == plain.shape
        torch.testing.assert_close(fast, plain, atol=TOLERANCE, rtol=0)
        if t:
            gradient = torch.randn(fast.shape, dtype=torch.float64, generator=g)
            inputs = [q, k, v, *biases.values(), *own_tokens.values()]
            got = torch.autograd.grad(fast, inputs, gradient, allow_unused=True)
            wanted = torch.autograd.grad(plain, inputs, gradient, allow_unused=True)
            for a, b in zip(got, wanted, strict=True):
                zero = torch.zeros(())
                torch.testing.assert_close(zero if a is None else a, torch.zeros_like(a) if b is None else b,
                                           atol=TOLERANCE, rtol=0)
    finally:
        attention_chunks.CHUNK_SCORES = saved


@ways
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_causal_blocks_of_odd_lengths(attend, length):
    g = torch.Generator().manual_seed(length)
    o = offsets([length, 3])
    q, k, v = (draw(g, length + 3, 1, 4) for _ in range(3))
    plan = attention.AttentionPlan(o, o, causal=True)
    fast = attend(q, k, v, plan, weighting="softmax", scale=1.0)
    plain = reference.jagged_attention(q, k, v, o, o, causal=True, weighting="softmax", scale=1.0)
    torch.testing.assert_close(fast, plain, atol=TOLERANCE, rtol=0)


@ways
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("length", "window", "prefix"), [(200, 16, 8), (200, 100, 40), (130, 1, 0), (70, 64, 64)])
def test_semi_local_attention_over_many_blocks(attend, length, window, prefix, causal):
    g = torch.Generator().manual_seed(length)
    o = offsets([length, 3, 40])
    t = length + 43
    q, k, v = (draw(g, t, 2, 4) for _ in range(3))
    position_bias, bias_by_time = draw(g, 150), draw(g, time_bias.TIME_BUCKETS)
    when = torch.arange(t) * 10**8
    shared = {"query_time": when, "key_time": when, "window": window, "prefix": prefix}
    gradient = torch.randn(t, 2, 4, dtype=torch.float64, generator=g)
    for weighting in ("silu", "softmax"):
        how = {"weighting": weighting, "scale": 0.7, "position_bias": position_bias, "time_bias": bias_by_time}
        plan = attention.AttentionPlan(o, o, causal=causal, positions=150, **shared)
        fast = attend(q, k, v, plan, **how)
        plain = reference.jagged_attention(q, k, v, o, o, causal=causal, **how, **shared)
        torch.testing.assert_close(fast, plain, atol=TOLERANCE, rtol=0)
        inputs = (q, k, v, position_bias, bias_by_time)
        gradients = (torch.autograd.grad(out, inputs, gradient) for out in (fast, plain))
        for got, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


@ways
def test_times_in_no_order(attend):
    g = torch.Generator().manual_seed(0)
    o = offsets([150, 0, 70])
    q, k, v = (draw(g, 220, 1, 4) for _ in range(3))
    bias = draw(g, time_bias.TIME_BUCKETS)
    when = torch.randint(0, 10**13, (220,), generator=g)  # nearly each key's bucket differs from its neighbour's
    shared = {"query_time": when, "key_time": when}
    how = {"weighting": "silu", "scale": 1.0, "time_bias": bias}
    fast = attend(q, k, v, attention.AttentionPlan(o, o, causal=True, **shared), **how)
    plain = reference.jagged_attention(q, k, v, o, o, causal=True, **how, **shared)
    torch.testing.assert_close(fast, plain, atol=TOLERANCE, rtol=0)
    gradient = torch.randn(220, 1, 4, dtype=torch.float64, generator=g)
    gradients = (torch.autograd.grad(out, (q, k, v, bias), gradient) for out in (fast, plain))
    for got, wanted in zip(*gradients, strict=True):
        torch.testing.assert_close(got, wanted, atol=TOLERANCE, rtol=0)


@ways
def test_an_event_outside_prefix_and_window_is_not_seen(attend):
    g = torch.Generator().manual_seed(0)
    o = offsets([90])
    q, k, v = (torch.randn(90, 1, 4, generator=g) for _ in range(3))
    plan = attention.AttentionPlan(o, o, causal=True, window=10, prefix=5)
    before = attend(q, k, v, plan, weighting="softmax", scale=1.0)
    k[20], v[20] = 1e3, 1e3
    changed = (attend(q, k, v, plan, weighting="softmax", scale=1.0) != before).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == list(range(20, 31))


def test_pairs_are_those_that_the_mask_lets_meet():
    for lengths_, counts in (([7, 0, 12], [2, 3, 1]), ([30], [4])):
        keys, queries = offsets(lengths_), offsets(counts)
        for window, prefix in ((None, 0), (3, 2), (5, 0), (1, 9)):
            for causal in (True, False):
                plan = attention.AttentionPlan(keys if causal else queries, keys, causal=causal, window=window,
                                               prefix=prefix)
                seen = 0
                for n, m in zip(lengths_ if causal else counts, lengths_, strict=True):
                    steps = torch.arange(m)
                    gap = torch.arange(n)[:, None] - steps if causal else (m - steps).expand(n, m)
                    mask = gap >= 0
                    if window is not None:
                        mask &= (gap <= window) | (steps < prefix)
                    seen += int(mask.sum())
                assert plan.pairs == seen


def test_time_buckets():
    second = 1_000_000
    year = 365 * 86400 * second
    deltas = torch.tensor([0, second - 1, second, 60 * second, 3600 * second, year, 10**17, -60 * second])
    buckets = time_bias.time_bucket(deltas)
    assert buckets.tolist()[:4] == [0, 0, 0, 8]
    assert buckets[4] == 17 and buckets[5] == 37 and buckets[7] == buckets[3]
    assert buckets.max() < time_bias.TIME_BUCKETS


@ways
@pytest.mark.parametrize("weighting", ["silu", "softmax"])
def test_a_row_does_not_depend_on_its_neighbours(attend, weighting):
    g = torch.Generator().manual_seed(0)
    o = offsets([5, 90, 17])
    q, k, v = (torch.randn(112, 2, 8, generator=g) for _ in range(3))
    plan = attention.AttentionPlan(o, o, causal=True)
    together = attend(q, k, v, plan, weighting=weighting, scale=0.3)
    alone = offsets([90])
    part = slice(5, 95)
    plan = attention.AttentionPlan(alone, alone, causal=True)
    single = attend(q[part], k[part], v[part], plan, weighting=weighting, scale=0.3)
    torch.testing.assert_close(together[part], single, atol=1e-6, rtol=0)


@pytest.mark.parametrize("weighting", ["silu", "softmax"])
def test_single_precision_is_near_double(weighting):
    g = torch.Generator().manual_seed(1)
    o = offsets([200, 1, 33, 64])
    inputs = [torch.randn(298, 1, 24, generator=g, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(298, 1, 24, generator=g)
    when = torch.arange(298) * 10**8
    bias = torch.randn(time_bias.TIME_BUCKETS, generator=g)
    results = []
    for kind in (torch.float32, torch.float64):
        q, k, v = (x.to(kind) for x in inputs)
        plan = attention.AttentionPlan(o, o, causal=True, query_time=when, key_time=when)
        out = attention.jagged_attention(q, k, v, plan, weighting=weighting, scale=0.5, norm=7.0,
                                         time_bias=bias.to(kind))
        results.append([out.double(), *torch.autograd.grad(out, inputs, gradient.to(kind))])
    for single, double in zip(*results, strict=True):
        torch.testing.assert_close(single.double(), double.double(), atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("weighting", ["silu", "softmax"])
def test_the_number_of_threads_changes_no_bit(weighting):
    g = torch.Generator().manual_seed(2)
    o = offsets([150, 90, 200, 3, 120])
    q, k, v, gradient = (torch.randn(563, 2, 16, generator=g, requires_grad=True) for _ in range(4))
    bias = torch.randn(50, generator=g, requires_grad=True)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            plan = attention.AttentionPlan(o, o, causal=True, positions=50)
            out = attention.jagged_attention(q, k, v, plan, weighting=weighting, scale=0.5, position_bias=bias)
            results.append([out, *torch.autograd.grad(out, (q, k, v, bias), gradient)])
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_scores_beyond_every_exponent_stay_finite_and_nan_stays_nan():
    o = offsets([4])
    q = torch.tensor([-1e30, 1e30, 0.0, 1.0]).view(4, 1, 1)
    k = v = torch.ones(4, 1, 1)
    plan = attention.AttentionPlan(o, o, causal=True)
    for weighting in ("silu", "softmax"):
        out = attention.jagged_attention(q, k, v, plan, weighting=weighting, scale=1.0)
        assert torch.isfinite(out).all()
        bad = q.clone()
        bad[2] = float("nan")
        out = attention.jagged_attention(bad, k, v, plan, weighting=weighting, scale=1.0)
        assert torch.isnan(out[2]).all() and torch.isfinite(out[[0, 1, 3]]).all()
