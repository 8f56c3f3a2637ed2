"""Request states of models, cut by request and joined: what a cache of them needs.

A state is a list, of tensors whose first axis is the request, of ``Jagged`` and ``KeysValues`` with a row a request, or
of such lists (``semel.models.fields.FieldRanker``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from semel.batch import Jagged
from semel.models.attention import KeysValues


@runtime_checkable
class Shared(Protocol):
    """A model whose request side is computed once per request; ``semel.models.fields.FieldRanker`` says how."""

    def request(self, request: Mapping[str, Any]) -> Any:
        ...

    def score(self, state: Any, candidate: Mapping[str, Any], candidate_offsets: Tensor) -> Tensor:
        ...


@runtime_checkable
class DotProduct(Shared, Protocol):
    """A shared model whose logit is a product of one vector a request and one an item, which depends on the item's id
    alone: a catalogue of items is then scored as one matrix."""

    def request_vector(self, state: Any) -> Tensor:
        """[R, dim]."""
        ...

    def item_vector(self, item_ids: Tensor) -> Tensor:
        """[N] stable ids -> [N, dim]; request_vector @ item_vector.T are the logits."""
        ...


def requests_of(state: Any) -> int:
    """How many requests a state holds."""
    if isinstance(state, (list, tuple)):
        return requests_of(state[0])
    return len(state) if isinstance(state, Tensor) else len(state.offsets) - 1


def take(state: Any, start: int, stop: int) -> Any:
    """The state of requests ``start`` to ``stop``, in copies: nothing of the other requests is kept alive by it."""
    if isinstance(state, (list, tuple)):
        return [take(part, start, stop) for part in state]
    if isinstance(state, Tensor):
        return state[start:stop].clone()
    first, last = int(state.offsets[start]), int(state.offsets[stop])
    offsets = state.offsets[start : stop + 1] - first
    if isinstance(state, KeysValues):
        return KeysValues(state.keys[first:last].clone(), state.values[first:last].clone(), offsets)
    return Jagged(state.values[first:last].clone(), offsets)


def split(state: Any) -> list[Any]:
    """A state of its own for each request."""
    return [take(state, number, number + 1) for number in range(requests_of(state))]


def join(states: Sequence[Any]) -> Any:
    """States of the same model, their requests one after the other. ValueError for none."""
    if not states:
        raise ValueError("no states to join; a state of no requests comes from a batch of none")
    first = states[0]
    if isinstance(first, (list, tuple)):
        return [join(parts) for parts in zip(*states, strict=True)]
    if isinstance(first, Tensor):
        return torch.cat(list(states))
    lengths = torch.cat([state.offsets.diff() for state in states])
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    if isinstance(first, KeysValues):
        return KeysValues(torch.cat([s.keys for s in states]), torch.cat([s.values for s in states]), offsets)
    return Jagged(torch.cat([s.values for s in states]), offsets)


def bytes_of(state: Any) -> int:
    """What a state takes in memory."""
    if isinstance(state, (list, tuple)):
        return sum(bytes_of(part) for part in state)
    if isinstance(state, Tensor):
        return state.nbytes
    return sum(value.nbytes for value in vars(state).values())
