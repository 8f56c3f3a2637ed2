"""What is trained: a dense or mixture-of-experts transformer, or a sequence recommender. Read from TOML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from semel.planning.files import Section, open_section
from semel.planning.units import BYTES


@dataclass(frozen=True)
class Optimizer:
    """Bytes of state a parameter, beside the weight that computes and its gradient."""

    name: str = "adam"
    state: float = 12.0
    """Master weight and both moments in fp32: 4 + 4 + 4."""
    table_state: float = 4.0
    """Bytes of state a row of an embedding table has (row-wise Adagrad: one fp32)."""


OPTIMIZERS = {
    "adam": Optimizer("adam", 12.0),
    "adam-bf16": Optimizer("adam-bf16", 8.0),
    "adam-8bit": Optimizer("adam-8bit", 6.0),
    "sgd": Optimizer("sgd", 4.0),
    "adagrad": Optimizer("adagrad", 8.0),
}
"""Master weights in fp32 and: two moments in fp32, in bf16, in 8 bits; none; one accumulator in fp32."""


@dataclass(frozen=True)
class Transformer:
    """A decoder-only language model. Widths count numbers, ``sequence`` tokens, ``batch`` sequences a step."""

    name: str
    description: str
    layers: int
    width: int
    feedforward: int
    """Width inside the dense feed-forward block."""
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    sequence: int
    batch: int
    gated: bool = True
    """SwiGLU (three matrices) or GELU (two)."""
    tied: bool = False
    """Input and output embedding are one matrix."""
    biases: bool = False
    causal: bool = True
    """Fused kernels skip masked blocks, half the work. Model FLOPs count whole attention all the same, as papers do."""
    fused_attention: bool = True
    """Scores stay in the kernel (FlashAttention) instead of lying in memory as [heads, sequence, sequence]."""
    dropout: bool = False
    positions: int = 0
    """Learned position embeddings (rows); 0 = rotary or none."""
    experts: int = 0
    top_k: int = 0
    shared_experts: int = 0
    expert_width: int = 0
    dense_layers: int = 0
    """Leading layers that are dense in a mixture of experts."""
    expert_skew: float = 1.0
    """Tokens of the busiest rank over the mean, in the all-to-all and the experts."""
    query_rank: int = 0
    kv_rank: int = 0
    rope_width: int = 0
    """Multi-head latent attention (DeepSeek-V2, section 2.1); 0 = plain attention."""
    expert_units: int = 0
    """Most hosts that the experts of one token lie on (node-limited routing); 0 = no limit."""
    dtype: str = "bf16"
    """Of matrix products."""
    storage_dtype: str = "bf16"
    """Of weights and activations at rest."""
    gradient_dtype: str = "fp32"
    """Gradients are accumulated and reduced in it."""
    optimizer: Optimizer = OPTIMIZERS["adam"]

    @property
    def kind(self) -> str:
        return "transformer"

    def attention_parameters(self) -> float:
        """Weights of one attention block, its norm included."""
        w, h = self.width, self.head_width
        if self.kv_rank:
            inner = self.heads * (h + self.rope_width)
            query = w * self.query_rank + self.query_rank + self.query_rank * inner if self.query_rank else w * inner
            keys = w * (self.kv_rank + self.rope_width) + self.kv_rank + self.kv_rank * self.heads * 2 * h
            return query + keys + self.heads * h * w + w
        out = self.heads * h * w * 2 + self.kv_heads * h * w * 2
        bias = self.heads * h + 2 * self.kv_heads * h + w if self.biases else 0
        return out + bias + self._norm()

    def _norm(self) -> int:
        return 2 * self.width if self.biases else self.width

    def feedforward_parameters(self, width: int) -> float:
        """Weights of one feed-forward block of ``width`` (an expert, or the dense one), without its norm."""
        matrices = 3 if self.gated else 2
        return matrices * self.width * width + ((matrices - 1) * width + self.width if self.biases else 0)

    def layer_parameters(self, layer: int) -> tuple[float, float]:
        """(weights that every rank of an expert-parallel group holds, weights of the routed experts) of one layer."""
        dense = self.attention_parameters() + self._norm()
        if not self.is_moe(layer):
            return dense + self.feedforward_parameters(self.feedforward), 0.0
        one = self.feedforward_parameters(self.expert_width)
        return dense + self.shared_experts * one + self.width * self.experts, self.experts * one

    def is_moe(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    def parameters(self) -> float:
        """All weights of the model."""
        layers = sum(sum(self.layer_parameters(layer)) for layer in range(self.layers))
        embeddings = self.vocabulary * self.width * (1 if self.tied else 2) + self.positions * self.width
        return layers + embeddings + self._norm()

    def active_parameters(self) -> float:
        """Weights that one token meets."""
        idle = sum(self.layer_parameters(layer)[1] for layer in range(self.layers))
        return self.parameters() - idle * (1 - self.top_k / self.experts if self.experts else 0.0)

    def flops(self) -> float:
        """Model FLOPs of one step: forward and backward (twice the forward) of every matrix product, no recompute.

        Attention counts whole, without the causal half, as Megatron's formula does (arXiv 2104.04473, section 5.1).
        """
        tokens = self.batch * self.sequence
        positional = self.positions * self.width
        inputs = 0 if self.tied else self.vocabulary * self.width
        matrices = self.active_parameters() - inputs - positional
        score, value = self.head_width + (self.rope_width if self.kv_rank else 0), self.head_width
        attention = self.layers * self.heads * self.sequence * (score + value)
        return 3 * 2 * tokens * (matrices + attention)


@dataclass(frozen=True)
class Lengths:
    """Distribution of history lengths: log-normal, cut to [least, most]."""

    mean: float
    sigma: float = 1.0
    """Of the logarithm; 0 = all the same."""
    least: int = 1
    most: int = 0
    """0 = no limit."""


@dataclass(frozen=True)
class Table:
    """``count`` embedding tables of one kind."""

    name: str
    rows: int
    width: int
    count: int = 1
    pooling: float = 1.0
    """Rows read a sample (of a pooled feature)."""
    sequence: bool = False
    """One row for each event of the history, instead of ``pooling`` pooled into one."""
    candidate: bool = False
    """One row for each candidate."""
    skew: float = 1.0
    """Bytes of the busiest rank over the mean, after sharding."""


@dataclass(frozen=True)
class Recommender:
    """A sequence recommender: sharded tables, and a dense part that is replicated. ``batch`` counts requests a step."""

    name: str
    description: str
    batch: int
    tables: tuple[Table, ...]
    lengths: Lengths
    candidates: float = 1.0
    """Scored candidates a request."""
    encoder: str = "hstu"
    """``hstu``: layers over the history; ``none``: only pooled features."""
    layers: int = 0
    width: int = 0
    heads: int = 1
    head_width: int = 0
    bottom: tuple[int, ...] = ()
    """Widths of the network over dense features, the input's first (DLRM)."""
    top: tuple[int, ...] = ()
    """Widths of the network over the interactions, the input's first."""
    dtype: str = "bf16"
    storage_dtype: str = "bf16"
    gradient_dtype: str = "fp32"
    table_dtype: str = "fp32"
    exchange_dtype: str = "fp32"
    """Of embeddings and their gradients on the wire."""
    optimizer: Optimizer = OPTIMIZERS["adam"]

    @property
    def kind(self) -> str:
        return "recommender"

    def dense_parameters(self) -> float:
        """Weights of the dense part. An HSTU layer has one matrix to u, v, q and k, and one back (arXiv 2402.17152)."""
        inner = self.heads * self.head_width
        encoder = self.layers * (self.width * 4 * inner + inner * self.width + 4 * inner + 3 * self.width)
        return encoder + sum(a * b + b for net in (self.bottom, self.top) for a, b in pairwise(net))

    def table_parameters(self) -> float:
        return float(sum(table.rows * table.width * table.count for table in self.tables))


Job: TypeAlias = Transformer | Recommender


def load_job(source: str | Path | Mapping) -> Job:
    """A job from a TOML file, a ready file's name (``ready("jobs")``), or a parsed mapping.

    Raises FileNotFoundError for what is neither, ValueError for unknown or missing fields and counts that do not fit.
    """
    section = open_section("jobs", source)
    return read_job(section)


def read_job(section: Section) -> Job:
    kind = section.choice("kind", ("transformer", "recommender"))
    job = _transformer(section) if kind == "transformer" else _recommender(section)
    section.done()
    return job


def _optimizer(section: Section) -> Optimizer:
    name = section.choice("optimizer", tuple(OPTIMIZERS), "adam")
    return OPTIMIZERS[name]


def _dtype(section: Section, key: str, default: str) -> str:
    return section.choice(key, tuple(BYTES), default)


def _transformer(section: Section) -> Transformer:
    width, heads = section.count("width"), section.count("heads")
    kv_heads = section.count("kv_heads", heads)
    if "head_width" not in section and width % heads:
        section.fail("heads", f"{heads} heads do not divide width {width}; give head_width")
    if heads % kv_heads:
        section.fail("kv_heads", f"{kv_heads} do not divide {heads} heads")
    experts = section.count("experts", 0, least=0)
    top_k = section.count("top_k", 0, least=0)
    if experts and not 0 < top_k <= experts:
        section.fail("top_k", f"must lie in 1..{experts} (experts), got {top_k}")
    if not experts and top_k:
        section.fail("top_k", "is given, but experts is not")
    dtype = _dtype(section, "dtype", "bf16")
    layers = section.count("layers")
    dense = section.count("dense_layers", 0, least=0)
    if dense > layers:
        section.fail("dense_layers", f"{dense} is above layers = {layers}")
    return Transformer(
        name=section.text("name", section.stem), description=section.text("description", ""),
        layers=layers, width=width, feedforward=section.count("feedforward"), heads=heads, kv_heads=kv_heads,
        head_width=section.count("head_width", width // heads), vocabulary=section.count("vocabulary"),
        sequence=section.count("sequence"), batch=section.count("batch"), gated=section.flag("gated", True),
        tied=section.flag("tied", False), biases=section.flag("biases", False), causal=section.flag("causal", True),
        fused_attention=section.flag("fused_attention", True), dropout=section.flag("dropout", False),
        positions=section.count("positions", 0, least=0), experts=experts, top_k=top_k,
        shared_experts=section.count("shared_experts", 0, least=0),
        expert_width=section.count("expert_width") if experts else 0, dense_layers=dense,
        expert_skew=section.number("expert_skew", 1.0, least=1.0),
        query_rank=section.count("query_rank", 0, least=0), kv_rank=section.count("kv_rank", 0, least=0),
        rope_width=section.count("rope_width", 0, least=0),
        expert_units=section.count("expert_units", 0, least=0), dtype=dtype,
        storage_dtype=_dtype(section, "storage_dtype", "bf16" if dtype in ("fp8", "fp4", "int8", "int4") else dtype),
        gradient_dtype=_dtype(section, "gradient_dtype", "fp32"), optimizer=_optimizer(section))


def _recommender(section: Section) -> Recommender:
    tables = []
    for each in section.sections("tables"):
        tables.append(Table(
            name=each.text("name"), rows=each.count("rows"), width=each.count("width"), count=each.count("count", 1),
            pooling=each.number("pooling", 1.0, least=0.0), sequence=each.flag("sequence", False),
            candidate=each.flag("candidate", False), skew=each.number("skew", 1.0, least=1.0)))
        each.done()
    if not tables:
        section.fail("tables", "a recommender needs at least one [[tables]]")
    lengths = Lengths(1.0, 0.0)
    if "lengths" in section:
        part = section.section("lengths")
        lengths = Lengths(part.number("mean", least=1.0), part.number("sigma", 1.0, least=0.0), part.count("least", 1),
                          part.count("most", 0, least=0))
        if lengths.most and lengths.most < lengths.least:
            part.fail("most", f"{lengths.most} is below least = {lengths.least}")
        part.done()
    encoder = section.choice("encoder", ("hstu", "none"), "hstu")
    hstu = encoder == "hstu"
    width = section.count("width") if hstu else 0
    heads = section.count("heads", 1) if hstu else 1
    return Recommender(
        name=section.text("name", section.stem), description=section.text("description", ""),
        batch=section.count("batch"), tables=tuple(tables), lengths=lengths,
        candidates=section.number("candidates", 1.0, least=1.0), encoder=encoder,
        layers=section.count("layers") if hstu else 0, width=width, heads=heads,
        head_width=section.count("head_width", max(1, width // heads)) if hstu else 0,
        bottom=section.counts("bottom", ()), top=section.counts("top", ()), dtype=_dtype(section, "dtype", "bf16"),
        storage_dtype=_dtype(section, "storage_dtype", "bf16"),
        gradient_dtype=_dtype(section, "gradient_dtype", "fp32"),
        table_dtype=_dtype(section, "table_dtype", "fp32"), exchange_dtype=_dtype(section, "exchange_dtype", "fp32"),
        optimizer=_optimizer(section))
