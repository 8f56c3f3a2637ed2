"""Promise 4: a score does not depend on which other candidates or requests are in the batch."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from semel.batch import Jagged, JaggedTable, RequestBatch
from semel.models import make_model

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from model_batches import FEATURES, config, encoders, make_batch

TOLERANCE = 2e-6  # float32 summation order


def pick(batch: RequestBatch, request: int, candidates: list[int]) -> RequestBatch:
    """One request of a batch with some of its candidates, in the order given."""
    first = int(batch.candidate_offsets[request])
    index = torch.tensor([first + c for c in candidates], dtype=torch.int64)
    table = batch.request["history"]
    events = slice(int(table.offsets[request]), int(table.offsets[request + 1]))
    columns = {name: column[events] for name, column in table.columns.items()}
    history = JaggedTable(columns, torch.tensor([0, events.stop - events.start]))
    genres = batch.candidate["genres"]
    return RequestBatch(
        np.array(["r"], dtype=object),
        {**{n: v[request : request + 1] for n, v in batch.request.items() if n != "history"}, "history": history},
        {"item_id": batch.candidate["item_id"][index], "year": batch.candidate["year"][index],
         "genres": Jagged.from_rows([genres[int(i)].numpy() for i in index], dtype=np.int64).torch()},
        torch.tensor([0, len(index)]),
    )


@pytest.mark.parametrize(("kind", "encoder"), [
    ("sequence_ranker", "transformer"),
    *((kind, "hstu") for kind in ("sequence_ranker", "dlrm", "dcnv2", "rdcn", "wukong", "isolated_wukong", "final_mlp",
                                  "isolated_final_mlp", "dhen", "isolated_dhen", "deep_cross_attention",
                                  "sequence_dcnv2", "next_item")),
])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_score_is_the_same_alone_and_among_others(kind, encoder, data):
    sizes = data.draw(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), min_size=1, max_size=5))
    batch = make_batch([h for h, _ in sizes], [c for _, c in sizes], seed=data.draw(st.integers(0, 50)))
    torch.manual_seed(0)
    model = make_model(config(kind, encoder), FEATURES, encoders()).eval()
    request = data.draw(st.integers(0, len(sizes) - 1))
    chosen = data.draw(st.permutations(range(sizes[request][1])))[: data.draw(st.integers(1, sizes[request][1]))]
    with torch.inference_mode():
        whole = model(batch)
        part = model(pick(batch, request, chosen))
    first = int(batch.candidate_offsets[request])
    expected = whole[[first + c for c in chosen]]
    scale = float(whole.abs().max().clamp(min=1.0))
    torch.testing.assert_close(part, expected, atol=TOLERANCE * scale, rtol=0)


def test_nor_does_it_in_the_stages_that_lead_to_it(tmp_path):
    """What is retrieved among all, preranked among many and recommended among few has the score that it has alone."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from serving.stand_ins import make_store, save_next_item, save_tiny_model

    from semel.serving import Predictor, StageSize

    for store in make_store(tmp_path / "store"):
        store.close()
    for kind, save in (("rank", save_tiny_model), ("light", lambda run: save_tiny_model(run, seed=1, kind="dcnv2")),
                       ("next", save_next_item)):
        save(tmp_path / kind)
    with Predictor.load(tmp_path / "rank", tmp_path / "store", retrieve=tmp_path / "next",
                        prerank=tmp_path / "light", log_exposures=False) as predictor:
        for user in (1, 3, 999):
            said = {"context": {"surface": "home"}, "as_of": 10**15 // 2}
            answers = [(predictor.retrieve(user, 15, **said), predictor.retrieval.rank),
                       (predictor.prerank(user, list(range(40)), **said), predictor.prerank),
                       (predictor.recommend(user, 5, **said, retrieve=StageSize(10)), predictor.rank)]
            for answer, score_of in answers:
                for item, score in answer.results:
                    [(_, alone)] = score_of(user, [item], **said).results
                    assert abs(alone - score) <= TOLERANCE * max(1.0, abs(score))
