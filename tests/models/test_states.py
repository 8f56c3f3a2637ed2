"""Request states that were cut, kept and joined score like those that never were."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import FEATURES, config, encoders, make_batch

from semel.models import make_model
from semel.models.flops import rows
from semel.models.states import bytes_of, join, requests_of, split, take

KINDS = ["rdcn", "isolated_wukong", "isolated_final_mlp", "isolated_dhen", "deep_cross_attention", "sequence_ranker"]


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


def test_what_is_taken_keeps_nothing_else_alive():
    model = make_model(config("deep_cross_attention"), FEATURES, encoders()).eval()
    with torch.inference_mode():
        state = model.request(make_batch([9, 1, 9], [1, 1, 1]).request)
        part = take(state, 1, 2)
    assert requests_of(part) == 1 and 0 < bytes_of(part) < bytes_of(state) / 2
    with pytest.raises(ValueError, match="no states"):
        join([])
