"""What a sequence model must beat: popularity, user and item bias, nearest neighbours.

Each is fitted on ``TrainingEvents`` (the labelled candidates of the training requests, nothing later) and then used
like any model: called with a ``RequestBatch`` it gives logits ``[C, 1]`` of the label, ``score_items(batch, item_ids)``
gives ``[R, I]`` for full-catalogue ranking. At a request they read its history only. Numpy inside, torch at the edge.

Axis names: ``N`` training events, ``R`` requests, ``C`` candidates, ``I`` items, ``K`` neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from semel.batch import Jagged, JaggedTable, RequestBatch, RequestRows, expand_rows, offsets_of
from semel.features import MISSING, stable_id
from semel.metrics import sigmoid

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TrainingEvents:
    """``user``, ``item`` [N] int64 stable ids, ``as_of`` [N] int64 (when its request was made, microseconds), ``label``
    [N] 0 or 1. Sorted by user, then time; ties keep their order."""

    user: np.ndarray
    item: np.ndarray
    as_of: np.ndarray
    label: np.ndarray

    def __post_init__(self) -> None:
        if not len(self.user):
            raise ValueError("no training events: baselines need at least one labelled candidate")
        order = np.lexsort((self.as_of, self.user))
        for name in ("user", "item", "as_of", "label"):
            value = np.asarray(getattr(self, name))
            if value.shape != self.user.shape:
                raise ValueError(f"TrainingEvents.{name} has shape {value.shape}, user has {self.user.shape}")
            object.__setattr__(self, name, value[order])
        if not np.isin(self.label, (0, 1)).all():
            raise ValueError("TrainingEvents.label must be 0 or 1")

    @classmethod
    def from_rows(cls, rows: RequestRows, task: str = "like") -> TrainingEvents:
        """The labelled candidates of request rows. Raises KeyError for a task that the rows do not have."""
        if task not in rows.label:
            raise KeyError(f"no task {task!r} in these examples; they have {', '.join(rows.label) or 'none'}")
        keep = np.asarray(rows.label_mask[task], dtype=bool)
        request = np.repeat(np.arange(len(rows)), rows.candidates.lengths)[keep]
        return cls(stable_id(rows.pointers.user_id)[request], stable_id(rows.candidates.values)[keep],
                   rows.pointers.as_of[request], np.asarray(rows.label[task])[keep].astype(np.float64))

    def select(self, rows: np.ndarray) -> TrainingEvents:
        return TrainingEvents(self.user[rows], self.item[rows], self.as_of[rows], self.label[rows])

    def requests(self) -> tuple[np.ndarray, np.ndarray]:
        """[N] the request of each event (events of one user with one ``as_of``), and [requests] its first event."""
        new = np.ones(len(self.user), dtype=bool)
        new[1:] = (self.user[1:] != self.user[:-1]) | (self.as_of[1:] != self.as_of[:-1])
        return np.cumsum(new) - 1, np.flatnonzero(new)


@dataclass(frozen=True)
class LikedHistory:
    """How a past event counts as liked: its ``column`` is at least ``threshold``. A history without that column says
    nothing about the user's taste, only which items were met."""

    column: str = "rating"
    threshold: float = 4.0

    def __call__(self, history: JaggedTable) -> np.ndarray | None:
        """[sum(lengths)] 1.0, 0.0, or NaN where the event has no value; None without the column."""
        if self.column not in history:
            return None
        value = np.asarray(history.columns[self.column])
        if value.dtype.kind in "iu":  # a categorical feature: the stable ids of numbers, see semel.features.stable_id
            whole = (value > -(1 << 52)) & (value < 1 << 52)  # the bits of any double but 0.0 lie outside
            value = np.where(value == MISSING, np.nan, np.where(whole, value, value.astype(np.int64).view(np.float64)))
        return np.where(np.isnan(value), np.nan, value >= self.threshold)


class Popularity:
    """How often an item was met in training, ``log(1 + count)``; its logit is that, calibrated on the labels."""

    def __init__(self, items: _Items, counts: np.ndarray, weights: np.ndarray) -> None:
        self.items, self.counts, self.weights = items, counts, weights

    @classmethod
    def fit(cls, events: TrainingEvents) -> Popularity:
        items = _Items.of(events.item)
        counts = np.bincount(items.index(events.item), minlength=len(items)).astype(np.float64)
        # As of each event, so that an item's popularity is not known before it happened.
        before = _sums_before(events.item, events.as_of, np.ones(len(events.item)))
        return cls(items, counts, _logistic(np.log1p(before)[:, None], events.label))

    def score(self, item: Any) -> np.ndarray:
        """[...] log(1 + count) of items; 0 for unknown ones."""
        return np.log1p(self.items.take(self.counts, item, 0.0))

    def logits(self, item: Any) -> np.ndarray:
        return self.weights[0] + self.weights[1] * self.score(item)

    def __call__(self, batch: RequestBatch) -> torch.Tensor:
        return _column(self.logits(_numpy(batch.candidate["item_id"])))

    def score_items(self, batch: RequestBatch, item_ids: Any) -> torch.Tensor:
        scores = self.score(_numpy(item_ids))
        return _tensor(np.broadcast_to(scores, (batch.requests, len(scores))).copy())


class BiasModel:
    """Shrunken item mean and shrunken user mean, put together by a logistic regression.

    ``logit P(like) = w0 + w1 logit(item mean) + w2 (user's mean residual)``. An item's mean is pulled towards the base
    rate by ``item_shrinkage`` pseudo-events; the user's residual (label minus item mean, over the request's history)
    towards 0 by ``user_shrinkage``. The weights are fitted on features as of each training event, so that no event
    sees its own label.
    """

    def __init__(self, items: _Items, rate: np.ndarray, base: float, weights: np.ndarray, liked: LikedHistory,
                 user_shrinkage: float) -> None:
        self.items, self.rate, self.base, self.weights = items, rate, base, weights
        self.liked, self.user_shrinkage = liked, user_shrinkage

    @classmethod
    def fit(cls, events: TrainingEvents, *, liked: LikedHistory | None = None, item_shrinkage: float = 10.0,
            user_shrinkage: float = 10.0, history_last: int = 200) -> BiasModel:
        """``history_last``: how many of a user's last events count, as in the histories that requests will bring."""
        items = _Items.of(events.item)
        code, one = items.index(events.item), np.ones(len(events.item))
        base = float(np.clip(events.label.mean(), 1e-6, 1 - 1e-6))
        count, sum_ = np.bincount(code, minlength=len(items)), np.bincount(code, events.label, len(items))
        rate = (sum_ + item_shrinkage * base) / (count + item_shrinkage)
        before = (_sums_before(events.item, events.as_of, events.label) + item_shrinkage * base) / (
            _sums_before(events.item, events.as_of, one) + item_shrinkage)
        residual = _sums_before(events.user, events.as_of, events.label - rate[code], history_last) / (
            _sums_before(events.user, events.as_of, one, history_last) + user_shrinkage)
        weights = _logistic(np.stack([_logit(before), residual], axis=1), events.label)
        return cls(items, rate, base, weights, liked or LikedHistory(), user_shrinkage)

    def user_residual(self, history_item: Jagged, history_liked: np.ndarray | None) -> np.ndarray:
        """[R] shrunken mean of label minus item mean over each history; 0 where it says nothing."""
        if history_liked is None:
            return np.zeros(len(history_item))
        known = ~np.isnan(history_liked)
        request = np.repeat(np.arange(len(history_item)), history_item.lengths)[known]
        residual = (history_liked - self.items.take(self.rate, history_item.values, self.base))[known]
        return np.bincount(request, residual, len(history_item)) / (
            np.bincount(request, minlength=len(history_item)) + self.user_shrinkage)

    def logits(self, item: Any, user_residual: np.ndarray) -> np.ndarray:
        """Logits of items for users of these residuals; shapes broadcast."""
        w0, w1, w2 = self.weights
        return w0 + w1 * _logit(self.items.take(self.rate, item, self.base)) + w2 * user_residual

    def __call__(self, batch: RequestBatch) -> torch.Tensor:
        residual = self._residual(batch)
        return _column(self.logits(_numpy(batch.candidate["item_id"]), residual[_requests(batch)]))

    def score_items(self, batch: RequestBatch, item_ids: Any) -> torch.Tensor:
        return _tensor(self.logits(_numpy(item_ids)[None], self._residual(batch)[:, None]))

    def _residual(self, batch: RequestBatch) -> np.ndarray:
        history = _history(batch)
        return self.user_residual(history["item_id"], self.liked(history))


class ItemKNN:
    """Next item by nearest neighbours: what users met soon after what this user met last.

    Item j is near i where j came at most ``window`` events after i in a user's order: the sum of ``1 / distance`` over
    ``sqrt(count_i count_j) + shrinkage`` (a directed, shrunken cosine), the ``neighbours`` nearest of each i kept. A
    request scores j by its nearness to the last ``last`` events of its history, each weighted by ``decay ** age``.
    Called with a batch it gives these scores, which are no logits of a label.
    """

    def __init__(self, near: _Neighbours, last: int, decay: float) -> None:
        self.near, self.last, self.decay = near, last, decay

    @classmethod
    def fit(cls, events: TrainingEvents, *, window: int = 20, shrinkage: float = 20.0, neighbours: int = 200,
            last: int = 20, decay: float = 0.6) -> ItemKNN:
        items = _Items.of(events.item)
        code = items.index(events.item)
        order = np.argsort(code, kind="stable")  # places of each item's events, item by item
        starts = offsets_of(np.bincount(code, minlength=len(items)))
        count = np.diff(starts).astype(np.float64)

        def pairs(low: int, high: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            here, cells, closeness = order[starts[low] : starts[high]], [], []
            for distance in range(1, window + 1):
                start = here[here + distance < len(code)]
                start = start[events.user[start] == events.user[start + distance]]
                cells.append(code[start] * len(items) + code[start + distance])
                closeness.append(np.full(len(start), 1 / distance))
            cell, place = np.unique(np.concatenate(cells), return_inverse=True)
            source, target = cell // len(items), cell % len(items)
            weight = np.bincount(place, np.concatenate(closeness), len(cell))
            return source, target, weight / (np.sqrt(count[source] * count[target]) + shrinkage)

        at_once = max(1, (1 << 21) // window)  # events, of about 2 million pairs
        cuts = np.searchsorted(starts, np.arange(0, len(code), at_once))
        blocks = pairwise(np.unique(np.append(cuts, len(items))))
        return cls(_Neighbours.of_pairs(items, (pairs(*block) for block in blocks), neighbours), last, decay)

    def score(self, history_item: Jagged, item: Any) -> np.ndarray:
        """[R, len(item)] scores of items for histories of stable ids; 0 for unknown items."""
        lengths = np.asarray(history_item.lengths)
        age = np.repeat(history_item.offsets[1:], lengths) - 1 - np.arange(len(history_item.values))
        weight = np.where(age < self.last, self.decay ** np.minimum(age, self.last), 0.0)
        return self.near.columns(self.near.spread(history_item, weight)[0], item)

    def __call__(self, batch: RequestBatch) -> torch.Tensor:
        item, column = np.unique(_numpy(batch.candidate["item_id"]), return_inverse=True)
        return _column(self.score(_history(batch)["item_id"], item)[_requests(batch), column])

    def score_items(self, batch: RequestBatch, item_ids: Any) -> torch.Tensor:
        return _tensor(self.score(_history(batch)["item_id"], _numpy(item_ids)))


class LikeKNN:
    """P(like) by nearest neighbours: ``BiasModel`` plus how the user took to similar items.

    Item similarity is the shrunken cosine of the items' residuals (label minus item mean minus user residual) over
    users, negative ones dropped, ``neighbours`` kept. The third feature of the logistic regression is the
    similarity-weighted mean residual of the history, pulled towards 0 by ``mean_shrinkage`` (after Koren, "Factor in
    the neighbors", 2010). Its weight is fitted on the last fifth of the training time, with similarities from the
    first four fifths: on its own events a neighbourhood looks better than it is.
    """

    def __init__(self, bias: BiasModel, near: _Neighbours, weights: np.ndarray, mean_shrinkage: float) -> None:
        self.bias, self.near, self.weights, self.mean_shrinkage = bias, near, weights, mean_shrinkage

    @classmethod
    def fit(cls, events: TrainingEvents, *, liked: LikedHistory | None = None, shrinkage: float = 20.0,
            mean_shrinkage: float = 0.5, neighbours: int = 200, history_last: int = 200) -> LikeKNN:
        def neighbourhood(part: TrainingEvents) -> LikeKNN:
            bias = BiasModel.fit(part, liked=liked, history_last=history_last)
            return cls(bias, _residual_neighbours(part, bias, shrinkage, neighbours),
                       np.array([*bias.weights, 0.0]), mean_shrinkage)

        model = neighbourhood(events)
        late = events.as_of > np.quantile(events.as_of, 0.8)
        if len(np.unique(events.label[late])) == 2:  # else too little time to see what the neighbourhood is worth
            early = neighbourhood(events.select(~late))
            model.weights = _logistic(early._training_features(events, late, history_last), events.label[late])
        return model

    def _training_features(self, events: TrainingEvents, rows: np.ndarray, history_last: int) -> np.ndarray:
        """[rows.sum(), 3] features of training events, from the user's events before the event's own request."""
        request, end = events.requests()
        start = np.maximum(np.searchsorted(events.user, events.user[end]), end - history_last)  # end: own first event
        kept, parts = np.unique(request[rows]), []
        for some in np.array_split(kept, len(kept) // 512 + 1):
            index, offsets = expand_rows(np.stack([start, end], axis=1).reshape(-1), 2 * some)
            own = np.flatnonzero(rows & np.isin(request, some))
            item, column = np.unique(events.item[own], return_inverse=True)
            grid = self._features(Jagged(events.item[index], offsets), events.label[index], item)
            parts.append(grid[np.searchsorted(some, request[own]), column])
        return np.concatenate(parts)

    def _features(self, history_item: Jagged, liked: np.ndarray | None, item: np.ndarray) -> np.ndarray:
        """[R, len(item), 3]: logit of the item mean, user residual, residual on similar items."""
        residual = self.bias.user_residual(history_item, liked)
        taste = np.zeros((len(history_item), len(item)))
        if liked is not None:
            bias = self.bias.items.take(self.bias.rate, history_item.values, self.bias.base)
            known = ~np.isnan(liked)
            own = np.where(known, liked - bias - np.repeat(residual, history_item.lengths), 0.0)
            total, nearness = self.near.spread(history_item, own, known.astype(np.float64))
            taste = self.near.columns(total, item) / (self.near.columns(nearness, item) + self.mean_shrinkage)
        rate = _logit(self.bias.items.take(self.bias.rate, item, self.bias.base))
        return np.stack(np.broadcast_arrays(rate[None], residual[:, None], taste), axis=-1)

    def logits(self, history_item: Jagged, liked: np.ndarray | None, item: np.ndarray) -> np.ndarray:
        """[R, len(item)] logits; ``liked`` like the history's values, see ``LikedHistory``."""
        return self.weights[0] + self._features(history_item, liked, item) @ self.weights[1:]

    def __call__(self, batch: RequestBatch) -> torch.Tensor:
        item, column = np.unique(_numpy(batch.candidate["item_id"]), return_inverse=True)
        history = _history(batch)
        return _column(self.logits(history["item_id"], self.bias.liked(history), item)[_requests(batch), column])

    def score_items(self, batch: RequestBatch, item_ids: Any) -> torch.Tensor:
        history = _history(batch)
        return _tensor(self.logits(history["item_id"], self.bias.liked(history), _numpy(item_ids)))


@dataclass(frozen=True)
class _Items:
    """The items of training: ``ids`` [I] sorted stable ids; an item's code is its place."""

    ids: np.ndarray

    @classmethod
    def of(cls, item: np.ndarray) -> _Items:
        return cls(np.unique(item))

    def __len__(self) -> int:
        return len(self.ids)

    def index(self, item: Any) -> np.ndarray:
        """Codes, -1 for unknown items."""
        item = np.asarray(item)
        place = np.minimum(np.searchsorted(self.ids, item), len(self.ids) - 1)
        return np.where(self.ids[place] == item, place, -1)

    def take(self, values: np.ndarray, item: Any, default: float) -> np.ndarray:
        code = self.index(item)
        return np.where(code >= 0, values[code], default)


@dataclass(frozen=True)
class _Neighbours:
    """``near`` [I, K] codes of the items nearest to each, ``nearness`` [I, K] (0 where there are fewer)."""

    items: _Items
    near: np.ndarray
    nearness: np.ndarray

    @classmethod
    def of_pairs(cls, items: _Items, blocks: Iterable[tuple[np.ndarray, np.ndarray, np.ndarray]],
                 neighbours: int) -> _Neighbours:
        """From source, target and nearness of distinct pairs, all pairs of one source in one block."""
        keep = min(neighbours, len(items))
        near, nearness = np.zeros((len(items), keep), np.int32), np.zeros((len(items), keep), np.float32)
        for source, target, value in blocks:
            order = np.lexsort((-value, source))
            order = order[source[order] != target[order]]  # an item is not its own neighbour
            place = np.arange(len(order)) - np.searchsorted(source[order], source[order])
            order, place = order[place < keep], place[place < keep]
            near[source[order], place], nearness[source[order], place] = target[order], value[order]
        return cls(items, near, nearness)

    @classmethod
    def of_blocks(cls, items: _Items, similarity: Callable[[int, int], torch.Tensor], neighbours: int,
                  block: int) -> _Neighbours:
        """``similarity(low, high)`` -> [high - low, I], ``block`` items at a time; negative ones count as none."""
        import torch

        count, keep = len(items), min(neighbours, len(items))
        near, nearness = np.empty((count, keep), np.int32), np.empty((count, keep), np.float32)
        for low in range(0, count, block):
            high = min(low + block, count)
            values = similarity(low, high)
            values[torch.arange(high - low), torch.arange(low, high)] = 0.0  # an item is not its own neighbour
            best, place = values.clamp_(min=0.0).topk(keep, dim=1, sorted=False)
            near[low:high], nearness[low:high] = place.numpy(), best.numpy()
        return cls(items, near, nearness)

    def spread(self, history_item: Jagged, *weights: np.ndarray) -> list[np.ndarray]:
        """For each array of weights (one a history value) [R, I]: the sum of weight times nearness to the item."""
        rows, count = len(history_item), len(self.items)
        code = self.items.index(history_item.values)
        use = (code >= 0) & np.any(np.stack(weights) != 0, axis=0)
        request = np.repeat(np.arange(rows), np.asarray(history_item.lengths))[use]
        cell = (request[:, None] * count + self.near[code[use]]).reshape(-1)
        nearness = self.nearness[code[use]]
        return [np.bincount(cell, (weight[use, None] * nearness).reshape(-1), rows * count).reshape(rows, count)
                for weight in weights]

    def columns(self, scores: np.ndarray, item: Any) -> np.ndarray:
        """[R, I] -> [R, len(item)]: the scores of these items, 0 for unknown ones."""
        code = self.items.index(item)
        return np.where(code >= 0, scores[:, code], 0.0)


def _residual_neighbours(events: TrainingEvents, bias: BiasModel, shrinkage: float, neighbours: int) -> _Neighbours:
    import torch

    users, user = np.unique(events.user, return_inverse=True)
    code, items = bias.items.index(events.item), bias.items
    residual = events.label - bias.rate[code]
    mean = np.bincount(user, residual) / (np.bincount(user) + bias.user_shrinkage)
    residual = (residual - mean[user]).astype(np.float32)
    cells_of = torch.from_numpy(np.stack([code, user]))
    by_item = torch.sparse_coo_tensor(cells_of, torch.from_numpy(residual), (len(items), len(users)),
                                      check_invariants=True).coalesce()
    norm = torch.from_numpy(np.sqrt(np.bincount(code, residual.astype(np.float64) ** 2, len(items))).astype(np.float32))

    def similarity(low: int, high: int) -> torch.Tensor:
        mine = (code >= low) & (code < high)
        block = torch.zeros(len(users), high - low)
        block.index_put_((torch.from_numpy(user[mine]), torch.from_numpy(code[mine] - low)),
                         torch.from_numpy(residual[mine]), accumulate=True)
        return torch.sparse.mm(by_item, block).T.contiguous() / (norm[low:high, None] * norm + shrinkage)

    block = max(1, (1 << 22) // max(len(users), len(items)))  # at most 4 million numbers at a time
    return _Neighbours.of_blocks(items, similarity, neighbours, block)


def _sums_before(group: np.ndarray, as_of: np.ndarray, value: np.ndarray, last: int | None = None) -> np.ndarray:
    """[N]: the sum of ``value`` over the rows of the same group with a strictly smaller ``as_of`` (the ``last`` of
    them), in the given order of rows."""
    order = np.lexsort((as_of, group))
    group, as_of = group[order], as_of[order]
    before = np.concatenate([[0.0], np.cumsum(value[order])])
    place = np.arange(len(group))
    new_group = np.concatenate([[True], group[1:] != group[:-1]])
    new_time = new_group | np.concatenate([[True], as_of[1:] != as_of[:-1]])
    low = np.maximum.accumulate(np.where(new_group, place, 0))
    high = np.maximum.accumulate(np.where(new_time, place, 0))
    if last is not None:
        low = np.maximum(low, high - last)
    out = np.empty(len(group))
    out[order] = before[high] - before[low]
    return out


def _logistic(features: np.ndarray, label: np.ndarray, ridge: float = 1.0) -> np.ndarray:
    """[F + 1] weights, intercept first, of a logistic regression by Newton's method with a small ridge."""
    design = np.concatenate([np.ones((len(features), 1)), features], axis=1)
    weights = np.zeros(design.shape[1])
    penalty = np.full(len(weights), ridge)
    for _ in range(25):
        probability = sigmoid(design @ weights)
        gradient = design.T @ (probability - label) + penalty * weights
        curvature = (design * (probability * (1 - probability))[:, None]).T @ design + np.diag(penalty)
        step = np.linalg.solve(curvature, gradient)
        weights = weights - step
        if np.abs(step).max() < 1e-8:
            break
    return weights


def _logit(probability: np.ndarray) -> np.ndarray:
    return np.log(probability) - np.log1p(-probability)


def _history(batch: RequestBatch) -> JaggedTable:
    return batch.request["history"].numpy()


def _requests(batch: RequestBatch) -> np.ndarray:
    offsets = _numpy(batch.candidate_offsets)
    return np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))


def _numpy(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)


def _tensor(values: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def _column(values: np.ndarray) -> torch.Tensor:
    return _tensor(values)[:, None]
