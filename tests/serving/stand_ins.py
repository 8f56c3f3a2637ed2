"""A small store with a catalogue, and a model of three lines in place of a trained one."""

from types import SimpleNamespace

import numpy as np
import pyarrow as pa

from semel.features import Feature, FeatureSpec, Task
from semel.history import EventSchema, HistoryStore

SPEC = FeatureSpec(
    history=(Feature("item_id"), Feature("rating", "numeric")),
    request=(Feature("hour", "numeric"), Feature("surface")),
    candidate=(Feature("genres", "multi"), Feature("year", "numeric")),
    tasks=(Task("like"), Task("rating", "regression")), history_last=50)


def make_store(path, strings=False):
    """20 users with 0 to 30 events each, 40 items of which half are in the catalogue; ids as strings on request."""
    kind = pa.string() if strings else pa.int64()
    rng = np.random.default_rng(7)
    users = np.repeat(np.arange(20), rng.integers(0, 30, 20))
    items = rng.integers(0, 40, len(users))
    name = (lambda values, prefix: [f"{prefix}ü{value}" for value in values]) if strings else lambda values, _: values
    store = HistoryStore.create(path, EventSchema({"item_id": kind, "rating": pa.float32(), "action": pa.string()},
                                                  user_id=kind), shards=2)
    store.append(pa.table({
        "user_id": pa.array(name(users, "u"), kind), "event_time": pa.array(rng.integers(1, 10**15, len(users))),
        "item_id": pa.array(name(items, "i"), kind), "rating": pa.array(rng.integers(1, 6, len(users)), pa.float32()),
        "action": pa.array(["rate"] * len(users))}))
    catalogue = HistoryStore.create(path / "catalogue", EventSchema(
        {"title": pa.string(), "genres": pa.string(), "year": pa.int32()}, user_id=kind, key="item_id"), shards=2)
    catalogue.append(pa.table({
        "item_id": pa.array(name(np.arange(20), "i"), kind), "event_time": pa.array([0] * 20, pa.int64()),
        "title": [f"Film {number}" for number in range(20)], "genres": ["drama|war", "comedy"] * 10,
        "year": pa.array(range(1980, 2000), pa.int32())}))
    return store, catalogue


def stand_in(forward, spec=SPEC, kind="ranking", version="stand-in-1"):
    """What ``load_model`` gives, around a function from a batch to [C, tasks]."""
    return SimpleNamespace(model=forward, features=spec, version=version, kind=kind, config={})


def seen_items(batch):
    """[C, 2]: how often each candidate is in the history, and its year: a model whose answers a test can foresee."""
    import torch

    history = batch.request["history"]
    rows = batch.candidate_to_request()
    counts = torch.stack([(history["item_id"][int(row)] == item).sum()
                          for item, row in zip(batch.candidate["item_id"], rows, strict=True)]).float()
    return torch.stack([counts, torch.nan_to_num(batch.candidate["year"])], dim=1)


def save_tiny_model(run, strings=False, seed=0, kind="sequence_ranker"):
    """A real, untrained ranker (HSTU) for the small store, in the folder ``run``."""
    import torch

    from semel.features import stable_id
    from semel.models import EncoderConfig, ModelConfig, Scale, Vocabulary, make_model, save_model

    torch.manual_seed(seed)
    config = ModelConfig(kind=kind, dim=8, hidden=(8,),
                         encoder=EncoderConfig(dim=16, layers=2, heads=2, head_dim=8, positions=51))
    items = np.array([f"iü{number}" for number in range(40)], dtype=object) if strings else np.arange(40)
    texts = {"surface": ["home", "search"], "genres": ["drama", "war", "comedy"]}
    encoders = {"item_id": Vocabulary(stable_id(items)), "rating": Scale(3.0, 1.0), "hour": Scale(12.0, 6.0),
                "year": Scale(1990.0, 5.0),
                **{name: Vocabulary(stable_id(np.array(values, dtype=object))) for name, values in texts.items()}}
    model = make_model(config, SPEC, encoders)
    with torch.no_grad():
        for parameter in model.parameters():  # large enough that histories and candidates matter
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return save_model(run, model, config, SPEC, name="tiny")


def save_next_item(run, strings=False, seed=0, known=30):
    """A real, untrained retrieval model, which knows the first ``known`` items of the small store."""
    import torch

    from semel.features import stable_id
    from semel.models import EncoderConfig, ModelConfig, Scale, Vocabulary, make_model, save_model

    torch.manual_seed(seed)
    config = ModelConfig(kind="next_item", dim=16,
                         encoder=EncoderConfig(dim=16, layers=1, heads=2, head_dim=8, positions=51))
    spec = FeatureSpec(history=SPEC.history, tasks=SPEC.tasks, history_last=50)
    items = np.array([f"iü{number}" for number in range(known)], dtype=object) if strings else np.arange(known)
    model = make_model(config, spec, {"item_id": Vocabulary(stable_id(items)), "rating": Scale(3.0, 1.0)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return save_model(run, model, config, spec, name="next")
