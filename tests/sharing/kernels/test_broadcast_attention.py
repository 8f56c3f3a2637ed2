"""``broadcast_attention`` against its plain form, one candidate at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import assert_equal, both_paths, counts, draw, offsets_of, running

from semel.sharing import kernels
from semel.sharing.kernels import attention_groups, reference

weightings = pytest.mark.parametrize("weighting", ["softmax", "silu"])


def with_tokens(attend, own, **how):
    """The function of q, k, v, (own_k, own_v) and offsets that the checks call."""
    def call(q, k, v, *rest):
        if own:
            own_k, own_v, *offsets = rest
            return attend(q, k, v, *offsets, own_k=own_k, own_v=own_v, **how)
        return attend(q, k, v, *rest, **how)
    return call


def check(path, candidates, history, queries, heads, width, own, seed=0, dtype=torch.float32, **how):
    c, s = sum(candidates), sum(history)
    shapes = [(c, queries, heads, width), (s, heads, width), (s, heads, width)]
    shapes += [(c, own, heads, width)] * 2 if own else []
    assert_equal(path, with_tokens(kernels.broadcast_attention, own, **how),
                 with_tokens(reference.broadcast_attention, own, **how), draw(seed, *shapes),
                 [offsets_of(candidates), offsets_of(history)], dtype)


@both_paths
@weightings
@settings(max_examples=15, deadline=None)
@given(candidates=counts, lengths=st.lists(st.integers(0, 9), min_size=4, max_size=4), queries=st.integers(1, 3),
       heads=st.integers(1, 2), own=st.integers(0, 2), norm=st.sampled_from([1.0, 3.0]), seed=st.integers(0, 99))
def test_equals_the_plain_form(path, weighting, candidates, lengths, queries, heads, own, norm, seed):
    history = lengths[: len(candidates)]
    check(path, candidates, history, queries, heads, 3, own, seed, weighting=weighting, norm=norm)


@both_paths
@weightings
@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_lengths_beyond_a_tile_and_off_its_edges(path, weighting, own, dtype):
    check(path, [45, 0, 1, 70], [100, 5, 0, 67], 2, 1, 20, own, dtype=dtype, weighting=weighting, scale=0.3)


@weightings
@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("scores", [1, 40, 1 << 18])
def test_groups_and_blocks_of_every_size(weighting, own, scores, monkeypatch):
    monkeypatch.setattr(attention_groups, "SCORES", scores)
    check("plain", [3, 3, 0, 1, 9, 3, 3, 8], [7, 6, 2, 0, 12, 7, 7, 11], 2, 2, 4, own, weighting=weighting)
    check("plain", [3, 3, 3], [7, 7, 7], 2, 2, 4, own, weighting=weighting)


@pytest.mark.parametrize("own", [0, 1])
@pytest.mark.parametrize("scores", [40, 1 << 18])
def test_softmax_without_fused_attention(own, scores, monkeypatch):
    """What devices other than a CPU run where Triton does not."""
    monkeypatch.setattr(attention_groups, "SCORES", scores)
    monkeypatch.setattr(attention_groups, "_fused", lambda q: False)
    check("plain", [3, 3, 0, 1, 9, 3, 3, 8], [7, 6, 2, 0, 12, 7, 7, 11], 2, 2, 4, own, weighting="softmax")


def test_groups_hold_each_request_once_and_little_padding():
    g = torch.Generator().manual_seed(0)
    queries, keys = (torch.randint(0, 60, (200,), generator=g).tolist() for _ in range(2))
    query_offsets, key_offsets = offsets_of(queries).tolist(), offsets_of(keys).tolist()
    seen, padded = [], 0
    cut = list(attention_groups.groups(query_offsets, key_offsets, 1, torch.device("cpu")))
    for rows, _ in cut:
        index = torch.arange(rows.start, rows.stop) if rows.index is None else rows.index
        seen += (index if rows.valid is None else index[rows.valid]).flatten().tolist()
    for rows, others in cut:
        padded += rows.requests * (rows.index.shape[1] if rows.index is not None else rows.stop - rows.start) * (
            others.index.shape[1] if others.index is not None else others.stop - others.start)
    wanted = [t for r in range(200) if keys[r] for t in range(query_offsets[r], query_offsets[r + 1])]
    assert sorted(seen) == wanted
    assert padded <= attention_groups.PADDING * sum(a * b for a, b in zip(queries, keys, strict=True))
    assert len(cut) < 150


@both_paths
@weightings
def test_a_query_that_sees_nothing_gets_zeros(path, weighting):
    with running(path) as device:
        q, k = torch.ones(3, 1, 1, 4, device=device), torch.ones(2, 1, 4, device=device)
        q.requires_grad_()
        out = kernels.broadcast_attention(q, k, k, offsets_of([2, 1]).to(device), offsets_of([0, 2]).to(device),
                                          weighting=weighting)
        out.sum().backward()
    assert (out[:2] == 0).all() and (out[2] != 0).all()
    assert torch.isfinite(q.grad).all() and (q.grad[:2] == 0).all()


@both_paths
@weightings
def test_scores_beyond_every_exponent_stay_finite(path, weighting):
    with running(path) as device:
        q = torch.tensor([-1e20, 1e20, 300.0], device=device).view(3, 1, 1, 1).requires_grad_()
        k = torch.tensor([1.0, -1.0, 2.0], device=device).view(3, 1, 1).requires_grad_()
        out = kernels.broadcast_attention(q, k, k, offsets_of([3]).to(device), offsets_of([3]).to(device),
                                          weighting=weighting, scale=1.0)
        out.sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(q.grad).all() and torch.isfinite(k.grad).all()


@both_paths
@weightings
def test_no_candidate_knows_another(path, weighting):
    with running(path) as device:
        q, k, own = (x.float().to(device) for x in draw(0, (6, 1, 2, 4), (9, 2, 4), (6, 1, 2, 4)))
        offsets = offsets_of([4, 2]).to(device), offsets_of([5, 4]).to(device)
        before = kernels.broadcast_attention(q, k, k, *offsets, weighting=weighting, own_k=own, own_v=own)
        q[1], own[1], k[5:] = 7.0, 9.0, 3.0  # another candidate, and another request's history
        after = kernels.broadcast_attention(q, k, k, *offsets, weighting=weighting, own_k=own, own_v=own)
    torch.testing.assert_close(after[[0, 2, 3]], before[[0, 2, 3]], rtol=1e-6, atol=1e-6)
    assert not torch.allclose(after[[1, 4, 5]], before[[1, 4, 5]])


@weightings
@pytest.mark.parametrize("own", [0, 1])
def test_gradients_are_those_of_finite_differences(weighting, own):
    offsets = [offsets_of([2, 0, 1]), offsets_of([3, 2, 0] if own else [3, 2, 1])]
    shapes = [(3, 2, 1, 2), (int(offsets[1][-1]), 1, 2), (int(offsets[1][-1]), 1, 2)] + [(3, 1, 1, 2)] * (2 * own)
    inputs = [x.requires_grad_() for x in draw(0, *shapes)]
    call = with_tokens(kernels.broadcast_attention, own, weighting=weighting)
    assert torch.autograd.gradcheck(lambda *x: call(*x, *offsets), inputs)


@pytest.mark.parametrize(("change", "says"), [
    ({"k": (5, 2, 4)}, "k has heads and width \\[2, 4\\] but q \\[1, 4\\]"),
    ({"v": (5, 1, 3)}, "v has shape \\[5, 1, 3\\] but k"),
    ({"q": (2, 1, 1, 4)}, "candidate_offsets ends at 3 but q has 2 rows"),
    ({"k": (4, 1, 4), "v": (4, 1, 4)}, "history_offsets ends at 5 but k has 4 rows"),
    ({"own_k": (3, 0, 1, 4), "own_v": (3, 0, 1, 4)}, "with at least one token, or None"),
    ({"own_k": (2, 1, 1, 4), "own_v": (2, 1, 1, 4)}, "own_k has shape"),
    ({"own_k": (3, 1, 1, 4)}, "only one of own_k and own_v"),
])
def test_tensors_that_do_not_fit(change, says):
    shapes = {"q": (3, 1, 1, 4), "k": (5, 1, 4), "v": (5, 1, 4)} | change
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    with pytest.raises(ValueError, match=says):
        kernels.broadcast_attention(**tensors, candidate_offsets=offsets_of([1, 2]), history_offsets=offsets_of([2, 3]))


def test_an_unknown_weighting():
    with pytest.raises(ValueError, match="weighting is 'relu'; give 'softmax' or 'silu'"):
        kernels.broadcast_attention(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1), torch.zeros(1, 1, 1),
                                    offsets_of([1]), offsets_of([1]), weighting="relu")
