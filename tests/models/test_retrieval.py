"""Retrieval with an isolated model: the same best candidates as scoring all at once, in bounded memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_batches import FEATURES, config, encoders, make_batch
from torch.utils._python_dispatch import TorchDispatchMode

from semel.models import make_model, top_k

KINDS = ["rdcn", "isolated_wukong", "isolated_final_mlp", "isolated_dhen", "deep_cross_attention", "sequence_ranker"]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10, deadline=None)
@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=5), k=st.integers(1, 12), chunk=st.integers(1, 40))
def test_the_best_are_those_of_scoring_all_at_once(kind, counts, k, chunk):
    batch = make_batch([3, 0, 7, 1, 2][: len(counts)], counts)
    torch.manual_seed(0)
    model = make_model(config(kind), FEATURES, encoders()).eval()
    found = top_k(model, batch, k, chunk=chunk, column=1)
    with torch.inference_mode():
        whole = model(batch)[:, 1]
    for request, count in enumerate(counts):
        scores = whole[int(batch.candidate_offsets[request]) :][:count]
        n = min(k, count)
        torch.testing.assert_close(found.score[request, :n], scores.topk(n).values, atol=2e-6, rtol=0)
        torch.testing.assert_close(scores[found.index[request, :n]], found.score[request, :n], atol=2e-6, rtol=0)
        assert len(set(found.index[request, :n].tolist())) == n
        assert (found.index[request, n:] == -1).all() and torch.isneginf(found.score[request, n:]).all()


class Largest(TorchDispatchMode):
    """The most numbers that any operator put out."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor._base is None:
                self.numbers = max(self.numbers, tensor.numel())
        return out


@pytest.mark.parametrize("kind", KINDS)
def test_sixteen_thousand_candidates_take_no_more_memory_than_a_chunk(kind):
    model = make_model(config(kind), FEATURES, encoders()).eval()
    largest = []
    for candidates in (1024, 16_384):
        batch = make_batch([20], [candidates])
        with Largest() as mode:
            found = top_k(model, batch, 10, chunk=512)
        assert found.score.isfinite().all()
        largest.append(mode.numbers)
    assert largest[1] == largest[0]


def test_impossible_sizes_are_one_clear_error():
    model = make_model(config("rdcn"), FEATURES, encoders())
    with pytest.raises(ValueError, match="at least 1"):
        top_k(model, make_batch([1], [2]), 0)
