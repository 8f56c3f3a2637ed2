"""DCN V2 over a sequence: its formula, its gradients, and that sharing changes nothing."""

import pytest
import torch
from model_batches import FEATURES, config, encoders, make_batch

from semel.models import make_model, ranking_loss
from semel.models.flops import count
from semel.models.reference import sequence_dcnv2
from semel.serving.broadcast import broadcast

TOLERANCE = 1e-10  # float64


def made(**changes):
    torch.manual_seed(0)
    model = make_model(config("sequence_dcnv2", **changes), FEATURES, encoders()).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def batch_of(lengths, candidates):
    batch = make_batch(lengths, candidates)
    for values in (batch.request, batch.candidate, batch.label):
        values.update({name: value.double() for name, value in values.items()
                       if isinstance(value, torch.Tensor) and value.is_floating_point()})
    return batch


@pytest.mark.parametrize("changes", [{}, {"cross_layers": 0}, {"cross_layers": 1}, {"encoder": "transformer"},
                                     {"window": 3}])
def test_it_is_its_formula_in_outputs_and_gradients(changes):
    batch, model = batch_of([5, 0, 9], [4, 2, 3]), made(**changes)
    found, plain = model(batch), sequence_dcnv2(model, batch)
    torch.testing.assert_close(found, plain, atol=TOLERANCE, rtol=TOLERANCE)
    parameters = [p for p in model.parameters() if p.requires_grad]
    ours, theirs = (torch.autograd.grad(ranking_loss(logits, batch, FEATURES.tasks), parameters, allow_unused=True)
                    for logits in (found, plain))
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE)


def test_shared_equals_copied_to_every_candidate():
    batch, model = batch_of([5, 0, 9], [4, 2, 3]), made()
    with torch.inference_mode():
        copied = torch.cat([model(part) for part in broadcast(batch)])
        torch.testing.assert_close(model(batch), copied, atol=TOLERANCE, rtol=TOLERANCE)


def test_history_request_and_candidate_all_matter_and_cross():
    """The mixed second difference of request and history is not zero: they meet in a product."""
    batch, model = batch_of([5], [3]), made()
    hour, ratings = batch.request["hour"], batch.request["history"].columns["rating"]
    with torch.inference_mode():
        scores = {}
        for a in (0, 1):
            for b in (0, 1):
                batch.request["hour"] = hour + 6.0 * a
                batch.request["history"].columns["rating"] = (ratings + b) % 5 + 1
                scores[a, b] = model(batch)
    assert (scores[1, 1] - scores[1, 0] - scores[0, 1] + scores[0, 0]).abs().min() > 1e-4
    assert scores[0, 0][:, 0].unique().numel() == 3


def test_the_request_side_is_made_once():
    model = made()
    one, many = batch_of([9], [1]), batch_of([9], [30])
    with torch.inference_mode():
        assert count(lambda: model.request(many.request)) == count(lambda: model.request(one.request)) > 0
        state = model.request(many.request)
        whole = count(lambda: model(many))
    alone = count(lambda: model.score(state, many.candidate, many.candidate_offsets))
    assert whole - alone == count(lambda: model.request(one.request))
