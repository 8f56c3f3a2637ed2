"""Who attends to whom in a target-aware sequence encoder: the history to its past, candidates to the history.

With ``config.window`` attention is semi-local, as in ULTRA-HSTU: everyone sees the first ``config.prefix`` events of
the history and the last ``config.window`` before itself.
"""

from __future__ import annotations

from torch import Tensor

from semel.models.attention import AttentionPlan
from semel.models.config import EncoderConfig


def history_plan(config: EncoderConfig, offsets: Tensor, time: Tensor,
                 query_time: Tensor | None = None) -> AttentionPlan:
    """``offsets`` [R + 1], ``time`` [T] microseconds of the events; ``query_time`` [T]: the moment at which each
    event's state is asked for something, its own time if None. One plan serves all layers of an encoder."""
    past = time if _use_time(config) else None
    return AttentionPlan(offsets, offsets, causal=True, positions=config.positions,
                         query_time=past if query_time is None or past is None else query_time, key_time=past,
                         window=config.window or None, prefix=config.prefix)


def candidate_plan(config: EncoderConfig, history_offsets: Tensor, history_time: Tensor, candidate_offsets: Tensor,
                   candidate_time: Tensor) -> AttentionPlan:
    """``candidate_offsets`` [R + 1], ``candidate_time`` [C]: when each candidate's request came."""
    use_time = _use_time(config)
    return AttentionPlan(candidate_offsets, history_offsets, causal=False, positions=config.positions,
                         query_time=candidate_time if use_time else None, key_time=history_time if use_time else None,
                         window=config.window or None, prefix=config.prefix)


def _use_time(config: EncoderConfig) -> bool:
    return config.time and config.kind == "hstu"
