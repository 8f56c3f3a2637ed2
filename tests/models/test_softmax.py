"""The fused softmax loss against its plain form, and the sampling of negatives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.models import reference, softmax


@settings(max_examples=40, deadline=None)
@given(positions=st.integers(0, 40), items=st.integers(2, 30), count=st.integers(1, 40), by_count=st.booleans(),
       chunk=st.sampled_from([1, 50, 1 << 19]), seed=st.integers(0, 99))
def test_equals_the_plain_form(positions, items, count, by_count, chunk, seed):
    g = torch.Generator().manual_seed(seed)
    table = torch.randn(items + 1, 4, dtype=torch.float64, generator=g).requires_grad_()
    query = torch.randn(positions, 4, dtype=torch.float64, generator=g).requires_grad_()
    target = torch.randint(1, items + 1, (positions,), generator=g)
    popularity = torch.rand(items, generator=g) + 0.1 if by_count else None
    negative, log_q = softmax.sample_negatives(items, count, g, popularity)

    def arguments():
        return query, table[target], target, table[negative], negative, log_q.double(), 0.3

    saved, softmax.CHUNK_LOGITS = softmax.CHUNK_LOGITS, chunk
    try:
        fast = softmax.softmax_loss(*arguments())
    finally:
        softmax.CHUNK_LOGITS = saved
    if not positions:
        assert fast == 0
        return
    plain = reference.softmax_loss(*arguments())
    torch.testing.assert_close(fast, plain, atol=1e-10, rtol=0)
    for got, wanted in zip(torch.autograd.grad(fast, (query, table)), torch.autograd.grad(plain, (query, table)),
                           strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=0)


def test_all_items_as_negatives_is_the_full_softmax():
    g = torch.Generator().manual_seed(0)
    table, query = torch.randn(21, 5, generator=g), torch.randn(33, 5, generator=g)
    target = torch.randint(1, 21, (33,), generator=g)
    negative, log_q = softmax.sample_negatives(20, 99, g)
    loss = softmax.softmax_loss(query, table[target], target, table[negative], negative, log_q, 0.5)
    full = torch.nn.functional.cross_entropy(query @ table[1:].T / 0.5, target - 1)
    torch.testing.assert_close(loss, full)


@pytest.mark.parametrize("popular", [False, True])
def test_negatives_are_distinct_and_their_chances_are_right(popular):
    g = torch.Generator().manual_seed(0)
    popularity = torch.arange(1, 51).float() if popular else None
    drawn = torch.zeros(51)
    for _ in range(2000):
        negative, log_q = softmax.sample_negatives(50, 10, g, popularity)
        assert len(negative.unique()) == 10 and negative.min() >= 1 and negative.max() <= 50
        drawn[negative] += 1
    negative, log_q = softmax.sample_negatives(50, 10, g, popularity)
    torch.testing.assert_close(drawn[negative] / 2000, log_q.exp(), atol=0.06, rtol=0.15)
