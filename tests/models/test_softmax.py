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


def test_threads_change_no_bit_and_float32_is_near():
    g = torch.Generator().manual_seed(0)
    query, table = 3 * torch.randn(500, 8, generator=g), torch.randn(401, 8, generator=g)
    target = torch.randint(1, 401, (500,), generator=g)
    negative, log_q = softmax.sample_negatives(400, 300, g)

    def result(loss, dtype):
        inputs = [x.to(dtype).requires_grad_() for x in (query, table)]
        value = loss(inputs[0], inputs[1][target], target, inputs[1][negative], negative, log_q.to(dtype), 0.3)
        return [value, *torch.autograd.grad(value, inputs)]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = result(softmax.softmax_loss, torch.float32)
        softmax_rows = [torch.randn(300, 400, generator=g) for _ in range(2)]
        softmax_rows[1].copy_(softmax_rows[0])
        top, mine = softmax_rows[0].amax(1), torch.rand(300, generator=g)
        sums = [softmax.normalize(softmax_rows[0], top, mine)]
        torch.set_num_threads(2)
        sums.append(softmax.normalize(softmax_rows[1], top, mine))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(*softmax_rows) and torch.equal(*sums)
    for got, wanted in zip(alone, result(reference.softmax_loss, torch.float64), strict=True):
        torch.testing.assert_close(got.double(), wanted, atol=3e-6 * wanted.detach().abs().max().item(), rtol=0)
