"""Deep cross attention (ROCS, arXiv 2607.27744, section 3.2): fields and history meet at every depth.

    S_i        = Enc_i(S_{i-1})                          the history alone: HSTU's or a transformer's layer
    Q_r, Q_c   = MLP_i(LCB_i(Y_{i-1}))                   a few queries a request, and a few a candidate
    A_r        = Attn(Q_r, S_i W_K^r, S_i W_V^r)         once per request
    A_c        = Attn(Q_c, S_i W_K^c, S_i W_V^c)         keys and values once per request, of a projection of their own
    Y_i        = Interaction_i([Y_{i-1}; A])             an isolated Wukong layer, by side

No event and no request field ever sees a candidate. What candidates read of a request: each depth's keys, values and
the request parts of its compressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from semel.batch import JaggedTable
from semel.features import FeatureSpec
from semel.models.attention import AttentionPlan, KeysValues, jagged_attention
from semel.models.config import EncoderConfig, ModelConfig
from semel.models.dropout import Dropout
from semel.models.embeddings import segment_mean
from semel.models.fields import IsolatedRanker, hidden_sides
from semel.models.heads import mlp
from semel.models.hstu import HSTULayer
from semel.models.isolated import IsolatedCompression, IsolatedHead, Sides, owners
from semel.models.plans import history_plan
from semel.models.transformer import TransformerLayer
from semel.models.wukong import IsolatedWukongLayer, ranks


class CrossAttention(nn.Module):
    """One side's queries against the history: ``queries`` [N, queries, dim] of rows that each belong to a request ->
    [N, queries, dim]. The attention is a softmax with a bias by distance from the end of the history."""

    def __init__(self, dim: int, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.head_dim = config.heads, config.head_dim
        inner = config.heads * config.head_dim
        self.query = mlp([dim, 2 * dim, inner])
        self.norm = nn.LayerNorm(config.dim)
        self.kv = nn.Linear(config.dim, 2 * inner)
        self.position_bias = nn.Parameter(torch.zeros(config.positions))
        self.out = nn.Linear(inner, dim)

    def keys_values(self, history: Tensor, offsets: Tensor) -> KeysValues:
        """[T, encoder.dim] -> what any queries can be asked of."""
        k, v = self.kv(self.norm(history)).view(len(history), 2, self.heads, self.head_dim).unbind(1)
        return KeysValues(k, v, offsets)

    def forward(self, queries: Tensor, shared: KeysValues, plan: AttentionPlan) -> Tensor:
        """``plan``: from all queries of a request, one row after the other, to its events."""
        n, each, _ = queries.shape
        q = self.query(queries).view(n * each, self.heads, self.head_dim)
        read = jagged_attention(q, shared.keys, shared.values, plan, weighting="softmax", scale=self.head_dim ** -0.5,
                                position_bias=self.position_bias)
        return self.out(read.view(n, each, self.heads * self.head_dim))


class DeepCrossAttentionLayer(nn.Module):
    """Depth i: ``request`` moves history and request fields on, ``candidate`` the candidate fields."""

    def __init__(self, inputs: Sides, block: Sides, hidden: list[Sides], config: ModelConfig) -> None:
        super().__init__()
        queries = Sides(config.queries, config.queries)
        encoder = config.encoder
        self.encoder = HSTULayer(encoder) if encoder.kind == "hstu" else TransformerLayer(encoder)
        self.compression = IsolatedCompression(inputs, queries)
        self.by_request = CrossAttention(config.dim, encoder)
        self.by_candidate = CrossAttention(config.dim, encoder)
        self.interaction = IsolatedWukongLayer(inputs.plus(queries), block, config.dim, ranks(config), hidden,
                                               config.dropout)

    def request(self, history: Tensor, fields: Tensor, past: AttentionPlan,
                plan: AttentionPlan) -> tuple[Tensor, Tensor, list[Any]]:
        history, _ = self.encoder.request(history, past)
        queries, compressed = self.compression.request(fields)
        read = self.by_request(queries, self.by_request.keys_values(history, past.key_offsets), plan)
        fields, met = self.interaction.request(torch.cat([fields, read], 1))
        return history, fields, [compressed, self.by_candidate.keys_values(history, past.key_offsets), met]

    def candidate(self, fields: Tensor, shared: Any, owner: Tensor, plan: AttentionPlan) -> Tensor:
        compressed, keys_values, met = shared
        read = self.by_candidate(self.compression.candidate(fields, compressed, owner), keys_values, plan)
        return self.interaction.candidate(torch.cat([fields, read], 1), met, owner)


class DeepCrossAttention(IsolatedRanker):
    """As deep as ``config.encoder`` has layers; each depth has an encoder layer and an interaction layer."""

    def __init__(self, config: ModelConfig, features: FeatureSpec, encoders: Mapping[str, nn.Module]) -> None:
        super().__init__(config, features, encoders)
        if not config.encoder.layers:
            raise ValueError("a deep_cross_attention model is as deep as its encoder: it needs encoder.layers of at "
                             "least 1")
        width = config.request_width, config.candidate_width
        block = self.fields.share(config.block_fields, *width)
        hidden = [self.fields.share(units, *width) for units in config.fm_hidden]
        inputs = [self.fields, *[block.times(2)] * config.encoder.layers]
        self.config = config
        self.history_token = nn.Linear(len(features.history) * config.dim, config.encoder.dim)
        self.dropout = Dropout(config.dropout)
        self.layers: Any = nn.ModuleList(DeepCrossAttentionLayer(given, block, hidden, config) for given in inputs[:-1])
        self.head = IsolatedHead(inputs[-1].times(config.dim), hidden_sides(config, self.fields), len(features.tasks),
                                 config.dropout)

    def request(self, request: Mapping[str, Any]) -> list[Any]:
        table: JaggedTable = request["history"]
        columns = self.tables.history(request)
        given = self.tables.request(request)
        if self.use_history:
            given = given + [segment_mean(column, table.offsets) for column in columns]
        fields = torch.stack(given, 1)
        history = self.dropout(self.history_token(torch.cat(columns, -1)))
        past = history_plan(self.config.encoder, table.offsets, table.columns["event_time"])
        each = torch.arange(len(fields) + 1, device=fields.device)
        plan = self._plan(each, table.offsets)
        kept = []
        for layer in self.layers:
            history, fields, shared = layer.request(history, fields, past, plan)
            kept.append(shared)
        return [kept, self.head.request(fields.flatten(1))[1]]

    def score(self, state: Any, candidate: Mapping[str, Any], candidate_offsets: Tensor) -> Tensor:
        kept, head = state
        fields = self.candidate_fields(candidate)
        owner = owners(candidate_offsets, len(fields))
        plan = self._plan(candidate_offsets, kept[0][1].offsets)  # all depths have the same events
        for layer, shared in zip(self.layers, kept, strict=True):
            fields = layer.candidate(fields, shared, owner, plan)
        return self.head.candidate(fields.flatten(1), head, owner)

    def _plan(self, row_offsets: Tensor, history_offsets: Tensor) -> AttentionPlan:
        """From the queries of rows by request to all events of the request."""
        return AttentionPlan(row_offsets * self.config.queries, history_offsets, causal=False,
                             positions=self.config.encoder.positions)
