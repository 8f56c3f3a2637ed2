"""Fast jagged attention against its plain form: outputs and all gradients."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.models import attention, reference

TOLERANCE = 1e-10  # float64


def offsets(lengths):
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.tensor(lengths, dtype=torch.int64).cumsum(0)])


def draw(generator, *shape):
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


lengths = st.lists(st.integers(0, 9), min_size=1, max_size=6)


@settings(max_examples=60, deadline=None)
@given(queries=lengths, keys=lengths, causal=st.booleans(), weighting=st.sampled_from(["silu", "softmax"]),
       own=st.booleans(), bias=st.booleans(), chunk=st.sampled_from([1, 30, 1 << 18]), seed=st.integers(0, 99))
def test_equals_the_plain_form(queries, keys, causal, weighting, own, bias, chunk, seed):
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
    biases = {"position_bias": draw(g, 5), "time_bias": draw(g, attention.TIME_BUCKETS)} if bias else {}
    own_tokens = {"own_k": draw(g, t, 2, 3), "own_v": draw(g, t, 2, 3)} if own and not causal else {}
    query_time = torch.randint(0, 10**13, (t,), generator=g)
    key_time = query_time if causal else torch.randint(0, 10**13, (s,), generator=g)
    times = {"query_time": query_time, "key_time": key_time}
    how = {"weighting": weighting, "scale": 0.7, "norm": 3.0}
    saved, attention.CHUNK_SCORES = attention.CHUNK_SCORES, chunk
    try:
        plan = attention.plan_attention(query_offsets, key_offsets, causal=causal, positions=5 if bias else 0, **times)
        fast = attention.jagged_attention(q, k, v, plan, **how, **biases, **own_tokens)
        plain = reference.jagged_attention(q, k, v, query_offsets, key_offsets, causal=causal, **how, **times, **biases,
                                           **own_tokens)
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
        attention.CHUNK_SCORES = saved


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_causal_blocks_of_odd_lengths(length):
    g = torch.Generator().manual_seed(length)
    o = offsets([length, 3])
    q, k, v = (draw(g, length + 3, 1, 4) for _ in range(3))
    plan = attention.plan_attention(o, o, causal=True)
    fast = attention.jagged_attention(q, k, v, plan, weighting="softmax", scale=1.0)
    plain = reference.jagged_attention(q, k, v, o, o, causal=True, weighting="softmax", scale=1.0)
    torch.testing.assert_close(fast, plain, atol=TOLERANCE, rtol=0)


def test_time_buckets():
    second = 1_000_000
    year = 365 * 86400 * second
    deltas = torch.tensor([0, second - 1, second, 60 * second, 3600 * second, year, 10**17, -60 * second])
    buckets = attention.time_bucket(deltas)
    assert buckets.tolist()[:4] == [0, 0, 0, 8]
    assert buckets[4] == 17 and buckets[5] == 37 and buckets[7] == buckets[3]
    assert buckets.max() < attention.TIME_BUCKETS


@pytest.mark.parametrize("weighting", ["silu", "softmax"])
def test_a_row_does_not_depend_on_its_neighbours(weighting):
    g = torch.Generator().manual_seed(0)
    o = offsets([5, 90, 17])
    q, k, v = (torch.randn(112, 2, 8, generator=g) for _ in range(3))
    plan = attention.plan_attention(o, o, causal=True)
    together = attention.jagged_attention(q, k, v, plan, weighting=weighting, scale=0.3)
    alone = offsets([90])
    part = slice(5, 95)
    plan = attention.plan_attention(alone, alone, causal=True)
    single = attention.jagged_attention(q[part], k[part], v[part], plan, weighting=weighting, scale=0.3)
    torch.testing.assert_close(together[part], single, atol=1e-6, rtol=0)
