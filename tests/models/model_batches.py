"""Batches drawn at random, in the shape that ``materialize`` gives."""

import numpy as np
import torch

from semel.batch import Jagged, JaggedTable, RequestBatch, offsets_of
from semel.features import MISSING, Feature, FeatureSpec, Task
from semel.models import EncoderConfig, ModelConfig, Scale, Vocabulary

FEATURES = FeatureSpec(
    history=(Feature("item_id"), Feature("rating")),
    request=(Feature("age"), Feature("hour", "numeric")),
    candidate=(Feature("year", "numeric"), Feature("genres", "multi")),
    tasks=(Task("like"), Task("rating", "regression", weight=0.5)),
    history_last=20,
)


def encoders():
    return {"item_id": Vocabulary(torch.arange(1, 40)), "rating": Vocabulary(torch.arange(1, 6)),
            "age": Vocabulary(torch.arange(5)), "hour": Scale(12, 4), "year": Scale(1990, 10),
            "genres": Vocabulary(torch.arange(8))}


def config(kind, encoder="hstu", window=0, **changes):
    encoder = EncoderConfig(kind=encoder, dim=8, layers=2, heads=2, head_dim=4, dropout=0.0, positions=21,
                            window=window, prefix=min(window, 2))
    small = {"dim": 8, "hidden": (16, 8), "dropout": 0.0, "block_fields": 5, "fm_rank": 3, "fm_hidden": (12,)}
    return ModelConfig(kind=kind, encoder=encoder, **{**small, **changes})


def make_batch(history_lengths, candidate_counts, seed=0):
    g = torch.Generator().manual_seed(seed)
    offsets, candidates = (torch.from_numpy(offsets_of(x)) for x in (history_lengths, candidate_counts))
    t, c, r = int(offsets[-1]), int(candidates[-1]), len(history_lengths)
    time = torch.randint(0, 10**15, (t,), generator=g).sort().values
    item = torch.randint(1, 45, (t,), generator=g)  # some ids are unknown to the vocabulary
    item[: min(1, t)] = MISSING
    genres = torch.randint(0, 3, (c,), generator=g)
    year = torch.randint(1960, 2020, (c,), generator=g).float()
    year[: min(1, c)] = float("nan")
    label = torch.randint(0, 2, (c,), generator=g).float()
    return RequestBatch(
        request_id=np.array([f"r{i}" for i in range(r)], dtype=object),
        request={
            "user_id": torch.arange(r), "as_of": torch.full((r,), 10**15),
            "age": torch.randint(0, 7, (r,), generator=g),
            "hour": torch.rand(r, generator=g) * 24,
            "history": JaggedTable({"event_time": time, "item_id": item,
                                    "rating": torch.randint(1, 6, (t,), generator=g)}, offsets),
        },
        candidate={
            "item_id": torch.randint(1, 45, (c,), generator=g), "year": year,
            "genres": Jagged(torch.randint(0, 9, (int(genres.sum()),), generator=g),
                             torch.cat([torch.zeros(1, dtype=torch.int64), genres.cumsum(0)])),
        },
        candidate_offsets=candidates,
        label={"like": label, "rating": label * 4 + 1},
        label_mask={"like": torch.rand(c, generator=g) < 0.7, "rating": torch.rand(c, generator=g) < 0.5},
    )


