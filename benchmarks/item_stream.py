"""A recommender trained while it serves, over a stream of labelled impressions: what was trained, what was served.

Time is that of the stream. Once a second the trainer takes what came in that second: it scores each impression before
the update that it causes (prequential: what NE in training means). Every impression was scored before by what serving
had at that moment:

    memory      the rows that were published up to ``interval`` seconds before, dense weights up to ``dense`` before
    frozen      rows of a bulk evaluation of the tower, made every ``bulk`` seconds from the weights of then for the
                items of then; an item that it does not have gets the base rate
    recompute   the tower at serving, with the weights of ``memory``: no cache at all

The model: user embedding . item embedding + a bias each; the item's is made by a tower from its id, its group and its
content, and, where there is a memory, joined with what is always on (group and content). ``frozen`` and ``recompute``
serve a model without a memory, which is trained beside it on the same stream.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semel.memory import ItemMemory, MemoryLayer, QuantizedMemory, pool
from semel.metrics import NormalizedEntropy

DIM = 16
SECOND = 1_000_000


@dataclass(frozen=True)
class Stream:
    """Impressions in order of ``second`` [N]: ``user``, ``item``, ``label`` [N]. Of each item: ``group`` and
    ``content`` [items, F], and the second in which it is ``born`` [items], in that order.
    ``truth(users, second, known)`` [users, known]: true logits of the items of then, where they are known."""

    second: np.ndarray
    user: np.ndarray
    item: np.ndarray
    label: np.ndarray
    group: np.ndarray
    content: np.ndarray
    born: np.ndarray
    users: int
    truth: Callable[[np.ndarray, int, int], np.ndarray] | None = None


def simulated(seed: int, seconds: int = 1800, per_second: int = 60, users: int = 200, items: int = 1000,
              hourly: float = 0.05) -> Stream:
    """A catalogue that grows by ``hourly`` of ``items`` an hour; half of all impressions go to the youngest tenth. A
    label is a draw from sigmoid(user . item + fashion - 1): an item's part is its group's and its own, its fashion goes
    up and down by 1.5 in half an hour, content tells a noisy part of its own."""
    random = np.random.default_rng(seed)
    groups, width = 40, 8
    later = round(items * hourly * seconds / 3600)
    total = items + later
    born = np.concatenate([np.zeros(items, np.int64), np.sort(random.integers(1, seconds, later))])
    group = random.integers(0, groups, total)
    taste = random.standard_normal((users, width))
    own = random.standard_normal((groups, width))[group] * 0.5 + random.standard_normal((total, width)) * 0.7
    content = np.concatenate([own + random.standard_normal(own.shape) * 1.5, np.ones((total, 1))], 1)
    phase = random.random(total) * 2 * np.pi

    def fashion(second: Any, item: Any) -> Any:
        return 1.5 * np.sin(2 * np.pi * second / 1800 + phase[item])

    second = np.repeat(np.arange(seconds), per_second)
    known = np.searchsorted(born, second, side="right")
    young = random.random(len(second)) < 0.5
    back = np.where(young, random.random(len(second)) * known * 0.1, random.random(len(second)) * known)
    item = known - 1 - back.astype(np.int64)
    user = random.integers(0, users, len(second))
    logit = (taste[user] * own[item]).sum(1) + fashion(second, item) - 1.0
    label = random.random(len(second)) < 1 / (1 + np.exp(-logit))

    def truth(some: np.ndarray, at: int, upto: int) -> np.ndarray:
        return taste[some] @ own[:upto].T + fashion(at, np.arange(upto)) - 1.0

    return Stream(second, user, item, label, group, content.astype(np.float32), born, users, truth)


def replayed(path: Path, per_second: int = 60, limit: int = 120_000, like: float | None = None,
             speedup: float | None = None) -> Stream:
    """Real ratings by time: is it ``like`` or more (by default above the median)? An item is born when it is first
    rated; content: its genres; group: the first of them. The clock is that of the ratings, ``speedup`` times as fast;
    None: ``per_second`` of them a second, whatever the clock said then."""
    from semel.datasets import read

    dataset = read(path)
    events = {name: dataset.events[name].to_numpy(zero_copy_only=False) for name in
              ("user_id", "item_id", "rating", "event_time")}
    order = np.argsort(events["event_time"], kind="stable")[:limit]
    user = np.unique(events["user_id"][order], return_inverse=True)[1]
    raw = events["item_id"][order]
    ids, first, inverse = np.unique(raw, return_index=True, return_inverse=True)
    rank = np.argsort(np.argsort(first))  # of each item in the order of its first rating
    of = dict(zip(dataset.items["item_id"].to_pylist(), dataset.items["genres"].to_pylist(), strict=True))
    named = [(of.get(one) or "").split("|") for one in ids.tolist()]
    genres = {name: i for i, name in enumerate(sorted({name for row in named for name in row}))}
    content = np.zeros((len(ids), len(genres)), np.float32)
    for i, row in enumerate(named):
        content[rank[i], [genres[name] for name in row]] = 1
    second = np.arange(len(order)) // per_second
    if speedup is not None:
        time = events["event_time"][order]
        second = ((time - time[0]) / (SECOND * speedup)).astype(np.int64)
    rating = events["rating"][order].astype(float)
    label = rating >= like if like is not None else rating > np.median(rating)
    return Stream(second, user, rank[inverse], label, content.argmax(1), content, second[np.sort(first)],
                  int(user.max()) + 1)


class Ranker(nn.Module):
    """Logits [C] of users and items; with a memory the item's embedding is a ``MemoryLayer``'s."""

    def __init__(self, stream: Stream, with_memory: bool, reads: Any = "live") -> None:
        super().__init__()
        items, width = stream.content.shape
        self.user = nn.Embedding(stream.users, DIM)
        self.user_bias = nn.Embedding(stream.users, 1)
        sizes = items, int(stream.group.max()) + 1, width
        self.tower = Tower(*sizes, with_id=True)
        self.layer = MemoryLayer(self.tower, ItemMemory(items, DIM + 1), Tower(*sizes, with_id=False), miss_rate=0.1,
                                 reads=reads) if with_memory else None
        nn.init.normal_(self.user.weight, std=0.1)
        nn.init.zeros_(self.user_bias.weight)

    def forward(self, user: Tensor, item: Tensor, features: dict[str, Tensor], now: int) -> Tensor:
        vector = self.tower(features) if self.layer is None else self.layer(item, features, features, now=now)
        return self.scored(user, vector)

    def matrix(self, user: Tensor, vector: Tensor) -> Tensor:
        """[users, items] logits."""
        return self.user(user) @ vector[:, :-1].T + vector[:, -1] + self.user_bias(user)

    def scored(self, user: Tensor, vector: Tensor) -> Tensor:
        return (self.user(user) * vector[:, :-1]).sum(1) + vector[:, -1] + self.user_bias(user)[:, 0]


class Tower(nn.Module):
    def __init__(self, items: int, groups: int, width: int, with_id: bool) -> None:
        super().__init__()
        self.id = nn.Embedding(items, DIM) if with_id else None
        self.group = nn.Embedding(groups, DIM)
        self.content = nn.Linear(width, DIM)
        self.out = nn.Sequential(nn.ReLU(), nn.Linear(DIM, DIM + 1))
        for table in (self.id, self.group):
            if table is not None:
                nn.init.normal_(table.weight, std=0.1)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        x = self.group(features["group"]) + self.content(features["content"])
        return self.out(x if self.id is None else x + self.id(features["item"]))


@dataclass
class Served:
    """NE of one way to serve, all impressions after the warm-up; coverage, age of what was read, work of the tower."""

    ne: NormalizedEntropy
    young: NormalizedEntropy
    known: int = 0
    asked: int = 0
    tower_rows: int = 0
    recall: list[float] = field(default_factory=list)


def run(stream: Stream, *, reads: Any = "live", interval: int = 1, dense: int = 60, bulk: int = 300,
        budget: int = 4, warm_up: float = 0.3, quantized: bool = False, seed: int = 0) -> dict[str, Any]:
    """Trains both models over the stream, serves three ways, and returns NE trained and served, and their gaps.

    ``budget``: items of the candidate pool that training refreshes a second. ``young``: items born within 300 s.
    """
    torch.manual_seed(seed)
    models = {"memory": Ranker(stream, True, reads), "plain": Ranker(stream, False)}
    optimizers = {name: torch.optim.Adam(model.parameters(), lr=0.01) for name, model in models.items()}
    features = {"item": torch.arange(len(stream.group)), "group": torch.from_numpy(stream.group),
                "content": torch.from_numpy(stream.content)}
    trained = {name: Served(NormalizedEntropy(), NormalizedEntropy()) for name in models}
    served = {name: Served(NormalizedEntropy(), NormalizedEntropy()) for name in ("memory", "frozen", "recompute")}
    random = np.random.default_rng(0)
    seconds, edges = np.unique(stream.second, return_index=True)  # in the others nothing comes and nothing changes
    edges = np.append(edges, len(stream.second))
    begin = round(warm_up * len(stream.second))
    rows: Any = None
    weights: dict[str, Ranker] = {}
    frozen: tuple[Ranker, Tensor, int] | None = None
    training_rows = 0
    before = -1
    for step, second in enumerate(seconds.tolist()):
        some = slice(edges[step], edges[step + 1])
        now = second * SECOND
        layer = models["memory"].layer
        assert layer is not None
        if second // dense > before // dense:
            weights = {name: copy.deepcopy(model).eval() for name, model in models.items()}
        if second // interval > before // interval:
            rows = copy.deepcopy(layer.memory).eval() if rows is None else rows
            rows.merge(layer.memory.changes())
            reader: Any = QuantizedMemory(rows) if quantized else rows
        known = int(np.searchsorted(stream.born, second, side="right"))
        if bulks := second // bulk - before // bulk:
            plain = copy.deepcopy(models["plain"]).eval()
            known_then = int(np.searchsorted(stream.born, second // bulk * bulk, side="right"))
            with torch.no_grad():
                of = {name: value[:known_then] for name, value in features.items()}
                frozen = plain, plain.tower(of), known_then
            served["frozen"].tower_rows += known_then * bulks
        user, item = torch.from_numpy(stream.user[some]), torch.from_numpy(stream.item[some])
        label = stream.label[some].astype(np.float64)
        of = {name: value[item] for name, value in features.items()}
        young = second - stream.born[stream.item[some]] < bulk
        if some.start >= begin:
            assert frozen is not None
            with torch.no_grad():
                base = weights["memory"]
                assert base.layer is not None
                cached, hit = reader.read(item)[:2]
                vector = base.layer.fused(cached, base.layer.always_on(of), hit)
                _add(served["memory"], label, base.scored(user, vector), young, hit)
                have = item < frozen[2]
                scores = frozen[0].scored(user, frozen[1][item.clamp(max=frozen[2] - 1)])
                constant = torch.full_like(scores, float(torch.logit(torch.tensor(stream.label[:some.start].mean()))))
                _add(served["frozen"], label, torch.where(have, scores, constant), young, have)
                if stream.truth is not None and second % 60 == 30:
                    users = torch.from_numpy(random.choice(stream.users, 20, replace=False))
                    rows_of_all, hits = reader.read(torch.arange(known))[:2]
                    all_of = {name: value[:known] for name, value in features.items()}
                    fused = base.layer.fused(rows_of_all, base.layer.always_on(all_of), hits)
                    old = torch.full((len(users), known), float(constant[0]))
                    old[:, :frozen[2]] = frozen[0].matrix(users, frozen[1])
                    wanted = stream.truth(users.numpy(), second, known)
                    fresh = second - stream.born[:known] < bulk
                    for name, found in (("memory", base.matrix(users, fused)), ("frozen", old)):
                        served[name].recall += _recall(wanted, found.numpy(), fresh)
                _add(served["recompute"], label, weights["plain"].scored(user, weights["plain"].tower(of)), young,
                     torch.ones_like(have))
        for name, model in models.items():
            if some.start >= begin:
                model.eval()
                with torch.no_grad():
                    scores = model.scored(user, _live(model, of))
                _add(trained[name], label, scores, young, torch.ones(len(user), dtype=torch.bool))
            model.train()
            loss = nn.functional.binary_cross_entropy_with_logits(
                model(user, item, of, now), torch.from_numpy(label).float())
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
        training_rows += len(np.unique(stream.item[some]))
        need = pool(layer.memory, torch.arange(known), budget, now=now)
        layer.refresh(need, {name: value[need] for name, value in features.items()}, now=now)
        served["memory"].tower_rows += len(need)
        before = second
    return _report(trained, served, training_rows)


def _recall(wanted: np.ndarray, found: np.ndarray, fresh: np.ndarray, top: int = 100) -> list[float]:
    """For each user with a fresh item among the truly best ``top``: the share of those that are among the found."""
    out = []
    for truth, scores in zip(wanted, found, strict=True):
        best = np.argsort(-truth)[:top]
        best = best[fresh[best]]
        if len(best):
            out.append(float(np.isin(best, np.argsort(-scores, kind="stable")[:top]).mean()))
    return out


def _live(model: Ranker, of: dict[str, Tensor]) -> Tensor:
    """The item's embedding as training sees it: the tower's own output, nothing hidden."""
    live = model.tower(of)
    if model.layer is None:
        return live
    return model.layer.fused(live, model.layer.always_on(of), torch.ones(len(live), dtype=torch.bool))


def _add(to: Served, label: np.ndarray, scores: Tensor, young: np.ndarray, hit: Tensor) -> None:
    logits = scores.double().numpy()
    to.ne.update_logits(label, logits)
    if young.any():
        to.young.update_logits(label[young], logits[young])
    to.known += int(hit.sum())
    to.asked += len(hit)


def _report(trained: dict[str, Served], served: dict[str, Served], training_rows: int) -> dict[str, Any]:
    of = {"memory": "memory", "frozen": "plain", "recompute": "plain"}
    result: dict[str, Any] = {"trained": {name: one.ne.ne for name, one in trained.items()}, "served": {}}
    for name, one in served.items():
        base = trained[of[name]]
        result["served"][name] = {
            "ne": one.ne.ne, "gap": one.ne.ne / base.ne.ne - 1, "young_ne": one.young.ne,
            "young_gap": one.young.ne / base.young.ne - 1, "found": one.known / one.asked,
            "coverage": 1.0 if name != "frozen" else one.known / one.asked,
            "tower_rows_beside_training": one.tower_rows,
            **({"young_recall": float(np.mean(one.recall))} if one.recall else {})}
    gaps = {name: result["served"][name]["gap"] for name in served}
    result["gap_cut"] = 1 - gaps["memory"] / gaps["frozen"] if gaps["frozen"] > 0 else float("nan")
    with_memory = training_rows + served["memory"].tower_rows
    with_bulk = training_rows + served["frozen"].tower_rows
    result["tower_rows"] = {"memory": with_memory, "frozen": with_bulk, "ratio": with_memory / with_bulk}
    return result
