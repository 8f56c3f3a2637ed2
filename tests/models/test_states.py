"""Request states that were cut, kept and joined score like those that never were."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import FEATURES, config, encoders, make_batch

from semel.models import make_model
from semel.models.flops import count, rows
from semel.models.states import bytes_of, join, requests_of, split, take

MIXED = ["dcnv2", "dlrm", "wukong", "final_mlp", "dhen"]
KINDS = ["rdcn", "isolated_wukong", "isolated_final_mlp", "isolated_dhen", "deep_cross_attention", "sequence_ranker",
         "sequence_dcnv2", "next_item", *MIXED]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5), data=st.data())
def test_a_state_of_its_own_for_each_request(kind, lengths, data):
    batch = make_batch(lengths, [3] * len(lengths))
    torch.manual_seed(0)
    model = make_model(config(kind), FEATURES, encoders()).eval()
    order = data.draw(st.permutations(range(len(lengths))))
    with torch.inference_mode():
        state, whole = model.request(batch.request), model(batch)
        assert requests_of(state) == len(lengths)
        alone = split(state)
        assert [requests_of(one) for one in alone] == [1] * len(lengths)
        again = join([alone[number] for number in order])
        assert bytes_of(again) == bytes_of(state)
        index = torch.tensor([3 * number + place for number in order for place in range(3)])
        candidate = {name: rows(value, index) for name, value in batch.candidate.items()}
        scores = model.score(again, candidate, batch.candidate_offsets)
        torch.testing.assert_close(scores, whole[index], atol=2e-6, rtol=0)


@pytest.mark.parametrize("history", [True, False])
@pytest.mark.parametrize("kind", MIXED)
@settings(max_examples=8, deadline=None)
@given(requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4)), min_size=1, max_size=5))
def test_models_without_sides_equal_their_formula(kind, history, requests):
    """Outputs and gradients: what is computed once per request is what each candidate would have computed."""
    batch = make_batch([length for length, _ in requests], [count for _, count in requests])
    torch.manual_seed(0)
    model = make_model(config(kind, history=history), FEATURES, encoders()).double().eval()
    batch.request["hour"], batch.candidate["year"] = batch.request["hour"].double(), batch.candidate["year"].double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    got, expected = model(batch), model.mixed(model.all_fields(batch))
    torch.testing.assert_close(got, expected, atol=1e-10, rtol=1e-10)
    up = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad((out * up).sum(), list(model.parameters()), materialize_grads=True)
                      for out in (got, expected)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", ["dcnv2", "dlrm", "wukong", "dhen"])
def test_without_anything_of_the_request_a_state_says_only_how_many_there_are(kind):
    batch = make_batch([3, 0, 2], [2, 0, 3])
    model = make_model(config(kind, history=False), replace(FEATURES, request=()), encoders()).eval()
    with torch.inference_mode():
        state = model.request(batch.request)
        assert requests_of(state) == 3
        torch.testing.assert_close(model(batch), model.mixed(model.all_fields(batch)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["dcnv2", "dlrm"])
def test_first_products_are_made_once_per_request(kind):
    """Cheaper per candidate than the formula: the state holds products, not only fields."""
    model = make_model(config(kind), FEATURES, encoders()).eval()
    batch = make_batch([3], [50])
    with torch.inference_mode():
        assert count(lambda: model(batch)) < 0.85 * count(lambda: model.mixed(model.all_fields(batch)))


def test_what_is_taken_keeps_nothing_else_alive():
    model = make_model(config("deep_cross_attention"), FEATURES, encoders()).eval()
    with torch.inference_mode():
        state = model.request(make_batch([9, 1, 9], [1, 1, 1]).request)
        part = take(state, 1, 2)
    assert requests_of(part) == 1 and 0 < bytes_of(part) < bytes_of(state) / 2
    with pytest.raises(ValueError, match="no states"):
        join([])
