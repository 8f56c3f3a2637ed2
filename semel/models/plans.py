"""Who attends to whom in a target-aware sequence encoder: the history to its past, candidates to the history."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from semel.models.attention import AttentionPlan
from semel.models.config import EncoderConfig


@dataclass(frozen=True)
class Plans:
    """The attention plans of one batch, shared by all layers of an encoder."""

    history: AttentionPlan
    candidate: AttentionPlan | None

    @classmethod
    def of(cls, config: EncoderConfig, history_offsets: Tensor, history_time: Tensor,
           candidate_offsets: Tensor | None = None, candidate_time: Tensor | None = None,
           query_time: Tensor | None = None) -> Plans:
        """``history_offsets`` [R + 1], ``history_time`` [T] microseconds; the same for candidates, or None.

        ``query_time`` [T]: the moment at which each event's state is asked for something, its own time if None.
        """
        use_time = config.time and config.kind == "hstu"
        past = history_time if use_time else None
        asked = past if query_time is None or not use_time else query_time
        history = AttentionPlan(history_offsets, history_offsets, causal=True, positions=config.positions,
                                 query_time=asked, key_time=past)
        if candidate_offsets is None:
            return cls(history, None)
        candidate = AttentionPlan(
            candidate_offsets, history_offsets, causal=False, positions=config.positions,
            query_time=candidate_time if use_time else None, key_time=past,
        )
        return cls(history, candidate)
