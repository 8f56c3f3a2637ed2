"""Plain forms of the fast algorithms in this folder: they read like their formulas and are what tests hold those to.

One row and one head at a time, no chunks, no recomputation. Quadratic memory; use them to read and to check.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from semel.batch import RequestBatch
from semel.models.attention import Weighting
from semel.models.dcn import RDCN, RDCNCrossNet, RDCNLayer
from semel.models.deep_cross_attention import CrossAttention, DeepCrossAttention
from semel.models.dhen import IsolatedCrossMember, IsolatedDHEN, IsolatedDHENLayer, IsolatedFieldAttention
from semel.models.fields import IsolatedRanker
from semel.models.final_mlp import IsolatedFinalMLP, IsolatedFusion
from semel.models.isolated import (
    IsolatedCompression,
    IsolatedHead,
    IsolatedLinear,
    IsolatedMLP,
    IsolatedNorm,
    Sides,
)
from semel.models.plans import history_plan
from semel.models.sequence_dcnv2 import SequenceDCNv2
from semel.models.time_bias import time_bucket
from semel.models.wukong import IsolatedFactorizationBlock, IsolatedWukong, IsolatedWukongLayer


def jagged_attention(
    q: Tensor, k: Tensor, v: Tensor, query_offsets: Tensor, key_offsets: Tensor, *, causal: bool,
    weighting: Weighting, scale: float, norm: float = 1.0, position_bias: Tensor | None = None,
    time_bias: Tensor | None = None, query_time: Tensor | None = None, key_time: Tensor | None = None,
    own_k: Tensor | None = None, own_v: Tensor | None = None, window: int | None = None, prefix: int = 0,
) -> Tensor:
    """``semel.models.attention.jagged_attention`` with its plan's arguments given directly."""
    rows = []
    for row in range(len(query_offsets) - 1):
        queries = slice(int(query_offsets[row]), int(query_offsets[row + 1]))
        keys = slice(int(key_offsets[row]), int(key_offsets[row + 1]))
        n, m = queries.stop - queries.start, keys.stop - keys.start
        steps = torch.arange(m)
        gap = torch.arange(n)[:, None] - steps if causal else (m - steps).expand(n, m)
        seen = gap >= 0
        if window is not None:
            seen = seen & ((gap <= window) | (steps < prefix))
        heads = []
        for head in range(q.shape[1]):
            score = q[queries, head] @ k[keys, head].T * scale
            if position_bias is not None:
                score = score + position_bias[gap.clamp(0, len(position_bias) - 1)]
            if time_bias is not None and query_time is not None and key_time is not None:
                score = score + time_bias[time_bucket(query_time[queries][:, None] - key_time[keys]).long()]
            if own_k is not None:
                own = (q[queries, head] * own_k[queries, head]).sum(-1, keepdim=True) * scale
                score = torch.cat([score, own], 1)
            mask = seen if own_k is None else torch.cat([seen, torch.ones(n, 1, dtype=torch.bool)], 1)
            if weighting == "silu":
                weight = torch.nn.functional.silu(score) * mask
            else:
                weight = torch.softmax(score.masked_fill(~mask, float("-inf")), -1)
            result = weight[:, :m] @ v[keys, head] / norm
            if own_v is not None:
                result = result + weight[:, m:] * own_v[queries, head] / norm
            heads.append(result)
        rows.append(torch.stack(heads, 1))
    return torch.cat(rows) if rows else torch.zeros_like(q)


def softmax_loss(query: Tensor, target_vector: Tensor, target: Tensor, negative_vector: Tensor, negative: Tensor,
                 negative_log_q: Tensor, temperature: float) -> Tensor:
    """``semel.models.softmax.softmax_loss``."""
    positive = (query * target_vector).sum(1, keepdim=True) / temperature
    logits = query @ negative_vector.T / temperature - negative_log_q
    logits = logits.masked_fill(negative == target[:, None], float("-inf"))
    return -torch.log_softmax(torch.cat([positive, logits], 1), 1)[:, 0].mean()


# Isolated parts, masked: full-width modules that run once per candidate on all of its units, request units first, with
# zeros (or hidden pairs) where a request unit would see a candidate. The weights are the isolated module's own.


def masked_weight(layer: IsolatedLinear) -> tuple[Tensor, Tensor | None]:
    """The block-lower-triangular weight [outputs, inputs] of an isolated linear layer, and its bias."""
    own, shared = layer.from_request.weight.split([layer.outputs.request, layer.outputs.candidate])
    above = own.new_zeros(layer.outputs.request, layer.inputs.candidate)
    weight = torch.cat([torch.cat([own, above], 1), torch.cat([shared, layer.from_candidate.weight], 1)])
    return weight, layer.from_request.bias


def masked_linear(layer: IsolatedLinear, x: Tensor) -> Tensor:
    """[C, inputs] -> [C, outputs]."""
    return torch.nn.functional.linear(x, *masked_weight(layer))


def masked_mlp(mlp: IsolatedMLP, x: Tensor) -> Tensor:
    for number, layer in enumerate(mlp.layers):
        x = masked_linear(layer, torch.relu(x) if number else x)
    return x


def masked_cross_layer(layer: RDCNLayer, x0: Tensor, x: Tensor) -> Tensor:
    return x0 * masked_linear(layer.linear, x) + x


def masked_cross_net(net: RDCNCrossNet, x0: Tensor) -> Tensor:
    """DCN V2 with a masked weight."""
    x = x0
    for layer in net.layers:
        x = masked_cross_layer(layer, x0, x)
    return x


def sequence_dcnv2(model: SequenceDCNv2, batch: RequestBatch) -> Tensor:
    """[C, tasks]: the scorer on the whole of ``x_0`` of every candidate; what candidates read of the history is the
    encoder's, which has references of its own."""
    request, kept = model.request_side(batch.request)
    candidate, _, reads, owner = model.candidate_side(kept, batch.candidate, batch.candidate_offsets)
    x0 = x = torch.cat([request[owner], candidate, reads], -1)
    for layer in model.cross.layers:
        x = x0 * layer(x) + x
    return model.head(torch.cat([x, torch.relu(model.deep(x0))], -1))


def masked_norm(norm: IsolatedNorm, x: Tensor, request: int) -> Tensor:
    """LayerNorm of the first ``request`` entries of the last axis and of the others."""
    return torch.cat([norm.request(x[..., :request]), norm.candidate(x[..., request:])], -1)


def masked_compression(module: IsolatedCompression, x: Tensor) -> Tensor:
    """[C, inputs, dim] -> [C, outputs, dim]."""
    return masked_weight(module.linear)[0] @ x


def masked_factorization(block: IsolatedFactorizationBlock, x: Tensor) -> Tensor:
    """All pairs of fields, those of a request row with a candidate field hidden; then the rows' projections."""
    fields = block.request_projection.shape[0]
    side = torch.arange(x.shape[1]) >= fields
    pairs = (x @ x.transpose(1, 2)).masked_fill(side[None, :] & ~side[:, None], 0.0)
    below = block.request_projection.new_zeros(x.shape[1] - fields, block.request_projection.shape[1])
    of_request = pairs[:, :fields] @ torch.cat([block.request_projection, below])
    of_candidate = pairs[:, fields:] @ torch.cat([block.shared_projection, block.candidate_projection])
    flat = torch.cat([block.norm.request(of_request.flatten(1)), block.norm.candidate(of_candidate.flatten(1))], 1)
    return masked_mlp(block.mlp, flat).unflatten(1, (block.outputs.total, -1))


def masked_wukong_layer(layer: IsolatedWukongLayer, x: Tensor) -> Tensor:
    fields = layer.compression.linear.inputs.request
    own, mixed = [], []
    for part in (masked_factorization(layer.factorization, x), masked_compression(layer.compression, x)):
        own.append(part[:, : layer.factorization.outputs.request])
        mixed.append(part[:, layer.factorization.outputs.request :])
    return torch.cat([layer.norm.request(torch.cat(own, 1) + layer.request_residual(x[:, :fields])),
                      layer.norm.candidate(torch.cat(mixed, 1) + layer.candidate_residual(x[:, fields:]))], 1)


def masked_cross_member(member: IsolatedCrossMember, x: Tensor) -> Tensor:
    return x * masked_linear(member.linear, x.flatten(1)).view_as(x)


def masked_field_attention(member: IsolatedFieldAttention, x: Tensor, fields: Sides) -> Tensor:
    """Attention with the context-first mask."""
    q, k, v = member.qkv(x).chunk(3, -1)
    side = torch.arange(fields.total) >= fields.request
    scores = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(side[None, :] & ~side[:, None], float("-inf"))
    return member.out(torch.softmax(scores, -1) @ v)


def masked_dhen_layer(layer: IsolatedDHENLayer, x: Tensor, fields: Sides) -> Tensor:
    total = x
    for name, member in layer.members.items():
        run: Any = {"cross": masked_cross_member, "factorization": masked_factorization, "linear": masked_compression,
                    "attention": lambda member, x: masked_field_attention(member, x, fields)}[name]
        total = total + run(member, x)
    own, mixed = total[:, : fields.request], total[:, fields.request :]
    return torch.cat([layer.norm.request(own), layer.norm.candidate(mixed)], 1)


def units_by_head(width: Sides, heads: int) -> Tensor:
    """Where the units of a stream, head by head and the request's first in each, lie when they are kept by side."""
    request = torch.arange(width.request).view(heads, -1)
    candidate = width.request + torch.arange(width.candidate).view(heads, -1)
    return torch.cat([request, candidate], 1).flatten()


def masked_fusion(fusion: IsolatedFusion, first: Tensor, second: Tensor, width: Sides) -> Tensor:
    """The whole bilinear form of two streams [C, width], by side: nothing needs a mask."""
    order = units_by_head(width, fusion.heads)
    one, two = (x[:, order].unflatten(1, (fusion.heads, -1)) for x in (first, second))
    fused = torch.einsum("nhi,thij,nhj->nt", one, fusion.weight, two)
    r = width.request
    by_side = torch.cat([first[:, :r], second[:, :r], first[:, r:], second[:, r:]], 1)
    return masked_mlp(fusion.linear, by_side) + fused


def masked_ranker(model: IsolatedRanker, batch: RequestBatch) -> Tensor:
    """Any isolated model, run per candidate on all fields of both sides with masked modules: [C, tasks]."""
    x = model.all_fields(batch)
    fields, owner = model.fields, batch.candidate_to_request()
    if isinstance(model, RDCN):
        r = fields.request
        units = x.flatten(1)
        given = units.split([r * x.shape[2], fields.candidate * x.shape[2]], 1)
        wide = torch.cat([model.widen_request(given[0]), model.widen_candidate(given[1])], 1)
        return _masked_head(model.head, [(masked_cross_net(model.cross, wide), model.cross.layers[0].linear.outputs),
                                         (torch.relu(masked_mlp(model.deep, units)), model.deep.layers[-1].outputs)])
    if isinstance(model, IsolatedWukong):
        for layer in model.layers.blocks:
            x = masked_wukong_layer(layer, x)
        return masked_mlp(model.head, x.flatten(1))
    if isinstance(model, IsolatedDHEN):
        compression, *layers = model.layers.blocks
        x = masked_compression(compression, x)
        sides = compression.linear.outputs
        for layer in layers:
            x = masked_dhen_layer(layer, x, sides)
        return masked_mlp(model.head, x.flatten(1))
    if isinstance(model, IsolatedFinalMLP):
        units = x.flatten(1)
        r = fields.request * x.shape[2]
        request, candidate = units[:, :r], units[:, r:]
        gates = [model.request_gate(request),
                 torch.cat([model.request_gate_of_second(request), model.candidate_gate(candidate)], 1)]
        first, second = (torch.relu(masked_mlp(stream, units * 2 * torch.sigmoid(gate)))
                         for stream, gate in zip((model.first, model.second), gates, strict=True))
        return masked_fusion(model.fusion, first, second, model.first.layers[-1].outputs)
    if isinstance(model, DeepCrossAttention):
        return _masked_deep_cross_attention(model, batch, x, owner)
    raise TypeError(f"no masked form of {type(model).__name__}")


def _masked_head(head: IsolatedHead, parts: list[tuple[Tensor, Sides]]) -> Tensor:
    """Parts of both sides each -> the head on the request units of all, then the candidate units of all."""
    split = [x.split([sides.request, sides.candidate], 1) for x, sides in parts]
    return masked_mlp(head, torch.cat([x for x, _ in split] + [x for _, x in split], 1))


def _masked_deep_cross_attention(model: DeepCrossAttention, batch: RequestBatch, x: Tensor, owner: Tensor) -> Tensor:
    """One candidate at a time: its request's history is encoded again, and every query meets every event."""
    table = batch.request["history"]
    tokens = model.history_token(torch.cat(model.tables.history(batch.request), -1))
    rows = []
    for number in range(len(x)):
        request = int(owner[number])
        events = slice(int(table.offsets[request]), int(table.offsets[request + 1]))
        history, fields = tokens[events], x[number : number + 1]
        alone = torch.tensor([0, len(history)])
        past = history_plan(model.config.encoder, alone, table.columns["event_time"][events])
        for layer in model.layers:
            history = layer.encoder.request(history, past)[0]
            r, queries = layer.compression.linear.inputs.request, model.config.queries
            asked = masked_compression(layer.compression, fields)[0]
            reads = [_read(side, asked[part], history) for side, part in
                     ((layer.by_request, slice(0, queries)), (layer.by_candidate, slice(queries, None)))]
            given = torch.cat([fields[:, :r], reads[0][None], fields[:, r:], reads[1][None]], 1)
            fields = masked_wukong_layer(layer.interaction, given)
        rows.append(masked_mlp(model.head, fields.flatten(1)))
    return torch.cat(rows) if rows else x.new_zeros(0, model.head.layers[-1].outputs.candidate)


def _read(attention: CrossAttention, queries: Tensor, history: Tensor) -> Tensor:
    """[queries, dim] against [events, width], written out head by head."""
    q = attention.query(queries).view(len(queries), attention.heads, -1)
    k, v = attention.kv(attention.norm(history)).view(len(history), 2, attention.heads, attention.head_dim).unbind(1)
    gap = len(history) - torch.arange(len(history))
    bias = attention.position_bias[gap.clamp(max=len(attention.position_bias) - 1)]
    heads = [torch.softmax(q[:, h] @ k[:, h].T * attention.head_dim ** -0.5 + bias, -1) @ v[:, h]
             for h in range(attention.heads)]
    return attention.out(torch.cat(heads, 1))
