"""The parts of a step: shares that add up to the whole's loss, and the exchange of rows in its place."""

import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import make_recipe, make_store, without_draws

from semel.batch import RequestBatch, offsets_of
from semel.features import Task
from semel.models import ranking_loss
from semel.training import Ranks
from semel.training.loops import plain
from semel.training.objectives import label_counts, make_objective, shared_ranking_loss
from semel.training.pieces import Workers
from semel.training.stages import StepStages, works
from semel.training.timeline import Timeline

TASKS = (Task("like"), Task("stars", "regression", weight=0.3))


def batch_of(lengths, seed, weighted):
    generator = np.random.default_rng(seed)
    count = int(sum(lengths))

    def tensor(values):
        return torch.from_numpy(np.asarray(values, np.float32))

    labels = {"like": tensor(generator.integers(0, 2, count)), "stars": tensor(generator.normal(size=count))}
    masks = {"like": torch.from_numpy(generator.random(count) < 0.7), "stars": torch.from_numpy(
        generator.random(count) < 0.2)}
    weight = tensor(generator.random(count)) if weighted else None
    return RequestBatch(np.arange(len(lengths)), {}, {}, torch.from_numpy(offsets_of(lengths)), labels, masks, weight)


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=12), cuts=st.lists(st.integers(0, 12), max_size=4),
       seed=st.integers(0, 99), weighted=st.booleans())
def test_shares_of_any_parts_add_up_to_the_whole(lengths, cuts, seed, weighted):
    """However unequal the parts, and with labels missing: the loss and its gradient are those of the whole batch."""
    batch = batch_of(lengths, seed, weighted)
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(batch.candidates, 2))).requires_grad_()
    whole = ranking_loss(logits, batch, TASKS)
    counts = label_counts(batch, TASKS)
    bounds = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    total = torch.zeros(())
    for a, b in pairwise(bounds):
        part, rows = batch.slice(a, b), slice(int(batch.candidate_offsets[a]), int(batch.candidate_offsets[b]))
        share = np.divide(label_counts(part, TASKS), counts, out=np.zeros(3), where=counts > 0)
        total = total + shared_ranking_loss(logits[rows], part, TASKS, share)
    assert float(total.detach()) == pytest.approx(float(whole.detach()), rel=1e-4, abs=1e-6)
    if batch.candidates:
        expected, found = (torch.autograd.grad(loss, logits)[0] for loss in (whole, total))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


def test_where_all_have_labels_a_share_is_one_multiplication():
    """The bits of the mean times the share, whatever the number of tasks."""
    batch = batch_of([3, 5], 1, False)
    batch = dataclasses.replace(batch, label_mask={name: torch.ones(8, dtype=torch.bool) for name in batch.label})
    part, logits = batch.slice(0, 1), torch.randn(3, 2)
    share = label_counts(part, TASKS) / label_counts(batch, TASKS)
    assert torch.equal(shared_ranking_loss(logits, part, TASKS, share), ranking_loss(logits, part, TASKS) * (3 / 8))


class Reversing:
    """An exchange on one rank: every row comes back, in another order."""

    def __init__(self):
        self.seen = 0

    def start(self, rows):
        self.seen += 1
        return Pending(rows.select(np.arange(len(rows))[::-1]))


@dataclasses.dataclass
class Pending:
    rows: object

    def wait(self):
        return self.rows


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("stages") / "store")


def losses(recipe, exchange):
    objective = make_objective(recipe)
    try:
        torch.manual_seed(0)
        model = objective.make_model()
        with Workers(recipe.pieces, 0) as workers:
            step = StepStages(recipe, objective, model, torch.optim.SGD(model.parameters(), lr=0.1), workers, Ranks(),
                              Timeline(), lambda: False, exchange)
            assert [s.name for s in step.stages()] == ["read", *(["exchange"] if exchange else []), "materialize",
                                                       "forward", "backward", "update"]
            return [float(work.update.loss) for work in plain(step.stages(), works(objective.loader, None, 0, 1),
                                                              Timeline())]
    finally:
        objective.close()


def test_rows_that_were_exchanged_give_the_same_losses(store, tmp_path):
    recipe, exchange = without_draws(make_recipe(store, tmp_path)), Reversing()
    moved, stayed = losses(recipe, exchange), losses(recipe, None)
    assert exchange.seen == len(moved) > 5
    assert moved == pytest.approx(stayed, rel=1e-5)
