"""FLOPs per request and per candidate against closed forms, and what reallocation does with them."""

from dataclasses import replace

import pytest
import torch
from model_batches import FEATURES, config, encoders, make_batch

from semel.models import cost_of, make_model, widen_candidate, widen_request
from semel.models.flops import count
from semel.models.reallocation import cost

PAIRS = [("rdcn", "dcnv2"), ("isolated_wukong", "wukong"), ("isolated_final_mlp", "final_mlp"),
         ("isolated_dhen", "dhen")]
DIM, LAYERS = 8, 3
REQUEST, CANDIDATE = 4 * DIM, 3 * DIM  # age, hour and the pooled item and rating; item, year, genres
NUMERIC = 2 * 2 * DIM  # each side has one numeric feature, embedded by a product


def test_rdcn_costs_what_its_blocks_cost():
    deep, hidden = (16, 8), [(9, 7), (5, 3)]
    found = cost(config("dcnv2", hidden=deep), FEATURES)
    d = REQUEST + CANDIDATE
    expected = LAYERS * d * d + d * 16 + 16 * 8 + (d + 8) * 2
    assert found.per_candidate == 2 * expected + NUMERIC and found.per_request == NUMERIC
    found = cost(config("rdcn", hidden=deep), FEATURES)
    (r1, c1), (r2, c2) = hidden
    once = LAYERS * REQUEST * d + REQUEST * 16 + r1 * 8 + (REQUEST + r2) * 2
    each = LAYERS * CANDIDATE * CANDIDATE + CANDIDATE * c1 + c1 * c2 + (CANDIDATE + c2) * 2
    assert found.per_candidate == 2 * each + NUMERIC and found.per_request == 2 * once + NUMERIC
    assert found.amortized(100) == found.per_candidate + found.per_request / 100
    assert 0 < found.request_share < 1


def test_attention_counts_the_pairs_that_meet():
    made = config("sequence_ranker")
    model = make_model(made, FEATURES, encoders()).eval()
    batches = [make_batch([length], [2]) for length in (0, 10)]
    costs = [cost_of(model, batch) for batch in batches]
    layers, heads, depth, dim = 2, 2, 4, 8
    # Ten events more: a token each, and ten more keys for every candidate.
    assert costs[1].per_candidate - costs[0].per_candidate == layers * 4 * 10 * heads * depth
    per_event = 2 * 2 * DIM * dim + layers * (2 * dim * 4 * heads * depth + 2 * heads * depth * dim)
    assert costs[1].per_request - costs[0].per_request == 10 * per_event + layers * 4 * 55 * heads * depth
    local = make_model(replace(made, encoder=replace(made.encoder, window=3, prefix=2)), FEATURES, encoders()).eval()
    assert cost_of(local, batches[1]).per_candidate == costs[0].per_candidate + layers * 4 * 5 * heads * depth


def test_nothing_is_counted_outside_a_count():
    a = torch.randn(3, 4)
    assert count(lambda: a @ a.T) == 2 * 3 * 4 * 3
    assert count(lambda: a + 1) == 0
    with pytest.raises(ValueError, match="without candidates"):
        cost_of(None, make_batch([2], [0]))


@pytest.mark.parametrize(("isolated", "plain"), PAIRS)
def test_an_isolated_model_costs_less_and_widened_as_much(isolated, plain):
    isolated, plain = config(isolated, hidden=(32, 16)), config(plain, hidden=(32, 16))
    budget = cost(plain, FEATURES).amortized(100)
    assert cost(isolated, FEATURES).amortized(100) < 0.7 * budget
    wide = widen_request(isolated, plain, FEATURES)
    assert wide.request_width > 1 and replace(wide, request_width=1.0) == isolated
    assert 0.95 * budget < cost(wide, FEATURES).amortized(100) <= budget
    # The candidate side is wider only where it reads more of the request, which is once per request.
    assert cost(wide, FEATURES).per_candidate <= 1.001 * cost(isolated, FEATURES).per_candidate


@pytest.mark.parametrize(("isolated", "plain"), PAIRS)
def test_candidates_may_have_a_part_of_it_first(isolated, plain):
    isolated, plain = config(isolated, hidden=(32, 16)), config(plain, hidden=(32, 16))
    budget = cost(plain, FEATURES).amortized(100)
    half = widen_candidate(isolated, plain, FEATURES, share=0.5)
    assert half.candidate_width > 1 and 0.4 * budget < cost(half, FEATURES).amortized(100) <= 0.5 * budget
    both = widen_request(half, plain, FEATURES)
    assert both.candidate_width == half.candidate_width and both.request_width > 1
    assert 0.95 * budget < cost(both, FEATURES).amortized(100) <= budget


def test_a_model_over_budget_is_one_clear_error():
    with pytest.raises(ValueError, match="costs more than 100% of the dcnv2"):
        widen_request(config("rdcn", candidate_width=9.0), config("dcnv2"), FEATURES)
