"""Gradients that are summed under backward: when they leave, in which order, and that the sums are the plain ones."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import make_recipe, make_store
from torch import nn

from semel.comm.processes import join, spawn
from semel.models import load_model
from semel.training import Run, Trainer, gradients, trainer
from semel.training.gradients import GradientSums, buckets
from semel.training.pieces import Workers
from semel.training.timeline import Timeline

pytestmark = pytest.mark.timeout(400)


def test_a_bucket_leaves_while_backward_still_computes():
    """The first layer's backward goes on only when the last layer's gradients have been sent."""
    sent, first = threading.Event(), nn.Linear(3, 3)
    last = nn.Linear(3, 1)

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            assert sent.wait(20)
            return gradient

    def over_ranks(flat):
        flat.mul_(2)  # another rank with the same
        sent.set()

    parameters = [*first.parameters(), *last.parameters()]
    sums = GradientSums(parameters, over_ranks, Timeline(), bucket_bytes=16)
    assert sums.buckets == [[3, 2], [1], [0]]
    x = torch.randn(5, 3)
    for _ in range(2):
        sent.clear()
        loss = last(Slow.apply(first(x))).sum()
        sums.begin(1)
        with sums.piece(0):
            torch.autograd.grad(loss, parameters)
        assert sums.end() == [True] * 4
        found = sums.wait()
        expected = torch.autograd.grad(last(first(x)).sum(), parameters)
        assert all(torch.equal(a, 2 * b) for a, b in zip(found, expected, strict=True))
    sums.close()


@settings(max_examples=25, deadline=None)
@given(pieces=st.integers(0, 4), used=st.lists(st.booleans(), min_size=4, max_size=4), size=st.integers(1, 40),
       before=st.booleans(), seed=st.integers(0, 99))
def test_the_sums_are_those_of_the_plain_way(pieces, used, size, before, seed):
    """Whatever pieces use of the parameters; one that two places share, and gradients that share memory, too."""
    torch.manual_seed(seed)
    parameters = [nn.Parameter(torch.randn(2, 3)) for _ in range(4)]
    order = []
    sums = GradientSums(parameters, lambda flat: order.append(flat.numel()), Timeline(), 8 * size)

    def loss(piece):
        torch.manual_seed(100 * seed + piece)
        scales = torch.randn(5)
        mine = [p for i, p in enumerate(parameters) if used[i] or i == piece]
        total = sum(mine[1:], mine[0]) if mine else torch.zeros(2, 3, requires_grad=True)  # one gradient for them all
        return (total * scales[4]).sum() + sum((s * p ** 2).sum() for s, p in zip(scales, mine, strict=False))

    earlier = [torch.randn(2, 3) if i % 2 else None for i in range(4)] if before else None
    with Workers(max(pieces, 1), 0) as workers:
        sums.begin(pieces, earlier)
        workers.parts(parameters, [loss(i) for i in range(pieces)], sums.piece)
        has = sums.end()
        found = sums.wait()
    sums.close()
    assert order == [sum(parameters[i].numel() for i in bucket) for bucket in sums.buckets]
    for i, total in enumerate(found):
        parts = [torch.autograd.grad(loss(n), parameters, allow_unused=True)[i] for n in range(pieces)]
        parts = [part for part in parts if part is not None] + ([] if earlier is None or earlier[i] is None
                                                                else [earlier[i]])
        assert has[i] == bool(parts)
        torch.testing.assert_close(total, sum(parts, torch.zeros(2, 3)), rtol=1e-6, atol=1e-6)


def test_buckets_hold_alike_parameters_from_the_last_on():
    sizes = [4, 300, 1, 1, 2]
    parameters = [torch.zeros(n, dtype=torch.float64 if i == 2 else torch.float32) for i, n in enumerate(sizes)]
    assert buckets(parameters, 40) == [[4, 3], [2], [1], [0]]
    assert buckets([], 40) == []


def both_ways(store, out):
    join()
    trainer.LOG_EVERY = 1
    gradients.BUCKET_BYTES = 600
    found = {"under": [str(Trainer(make_recipe(store, out, epochs=1, **way)).fit().path) for way in WAYS]}
    trainer.gradient_sums = lambda *_: None
    found["after"] = [str(Trainer(make_recipe(store, out, epochs=1, **way)).fit().path) for way in WAYS]
    return found


WAYS = [{}, {"accumulate_tokens": 150, "pieces": 4}]


def test_training_comes_to_the_same_bits_as_with_sums_after_backward(tmp_path):
    store = make_store(tmp_path / "store", users=12)
    found = spawn(both_ways, 2, store, tmp_path)[0]
    for under, after in zip(found["under"], found["after"], strict=True):
        one, other = Run.open(under), Run.open(after)
        curves = [[line["loss"] for line in run.metrics if line["kind"] == "train"] for run in (one, other)]
        assert curves[0] == curves[1] and len(curves[0]) > 2
        assert load_model(under).version == load_model(after).version
        names = [{event["name"] for event in run.timeline if event["pid"] == 1} for run in (one, other)]
        assert "gradients" in names[0] and "gradients" not in names[1]
        assert "exposed_gradient" in names[0] & names[1]
