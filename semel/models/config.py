"""What a model is, as data: enough, with its features and its weights, to build it again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

ModelKind = Literal[
    "sequence_ranker", "dlrm", "dcnv2", "rdcn", "wukong", "isolated_wukong", "final_mlp", "isolated_final_mlp", "dhen",
    "isolated_dhen", "deep_cross_attention", "sequence_dcnv2", "next_item", "early_ranker",
]
Member = Literal["cross", "factorization", "attention", "linear"]


def _at_least(config: Any, where: str, **least: int) -> None:
    for name, value in least.items():
        if not getattr(config, name) >= value:
            raise ValueError(f"{where}.{name} must be at least {value}, got {getattr(config, name)}")


def _shares(config: Any, where: str, *names: str) -> None:
    for name in names:
        if not 0.0 <= getattr(config, name) < 1.0:
            raise ValueError(f"{where}.{name} must be from 0 to below 1, got {getattr(config, name)}")


@dataclass(frozen=True)
class EncoderConfig:
    """``kind``: ``hstu`` or ``transformer``. ``dim``: width of a token; ``heads`` x ``head_dim``: attention;
    ``positions``: longest distance with a bias of its own (the history length and one); ``time``: relative time bias
    (HSTU only). ``window`` > 0: semi-local attention (ULTRA-HSTU's): each event and candidate sees the ``window``
    events before it and the first ``prefix`` of the history; 0: all of the past."""

    kind: Literal["hstu", "transformer"] = "hstu"
    dim: int = 64
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    dropout: float = 0.2
    positions: int = 201
    time: bool = True
    window: int = 0
    prefix: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("hstu", "transformer"):
            raise ValueError(f"encoder kind {self.kind!r} is none of hstu, transformer")
        _at_least(self, "encoder", dim=1, layers=0, heads=1, head_dim=1, positions=1, window=0, prefix=0)
        if self.prefix and not self.window:
            raise ValueError(f"encoder.prefix {self.prefix} says nothing without a window: set encoder.window above 0")
        _shares(self, "encoder", "dropout")


@dataclass(frozen=True)
class ModelConfig:
    """``kind``: which model. ``dim``: width of an embedding. ``encoder``: of sequence models. ``hidden``: widths of the
    layers of the head, of the deep network or of the streams. ``warm_start``: item tables begin at a factorization of
    which items meet within so many events (0: at random). ``cross_layers``: of DCNv2s and rDCN. ``history``: whether
    field models see the pooled history. ``unknown_rate``: share of item ids hidden while training, so that the row for
    unknown items is trained too. ``embedding_dropout``, ``similarity`` of a state and an item, divided by
    ``temperature``, ``negatives`` (0: full softmax) and ``popularity`` (negatives drawn in proportion to
    count ** popularity; 0: uniform): of next-item models.

    ``interaction_layers``: of Wukong and DHEN. ``block_fields``: fields that each of the two blocks of a Wukong layer
    gives; layers of Wukong and DHEN have twice as many. ``fm_rank``, ``fm_hidden``: of their factorization block.
    ``members``: of a DHEN layer. ``fusion_heads``: of FinalMLP. ``queries``: of deep cross attention, a request and a
    candidate; its depth is ``encoder.layers``.

    ``memory_rows``: most items that the memory of an early ranker holds; ``hash_buckets``: rows of its table of hashed
    ids; ``fuse``, ``reads``, ``miss_rate``: as of ``semel.memory.MemoryLayer``.

    ``request_width``, ``candidate_width``: of isolated models, each side's hidden units as a multiple of its share of
    the model without sides; the share is that of its input fields. ``semel.models.widen_request`` finds
    the request width that costs as much."""

    kind: ModelKind = "sequence_ranker"
    dim: int = 64
    encoder: EncoderConfig = EncoderConfig()
    hidden: tuple[int, ...] = (128, 64)
    warm_start: int = 3
    cross_layers: int = 3
    history: bool = True
    dropout: float = 0.1
    unknown_rate: float = 0.02
    embedding_dropout: float = 0.2
    similarity: Literal["cosine", "dot"] = "cosine"
    temperature: float = 0.05
    negatives: int = 512
    popularity: float = 0.0
    interaction_layers: int = 2
    block_fields: int = 8
    fm_rank: int = 8
    fm_hidden: tuple[int, ...] = (64,)
    members: tuple[Member, ...] = ("cross", "factorization")
    fusion_heads: int = 2
    queries: int = 2
    request_width: float = 1.0
    candidate_width: float = 1.0
    memory_rows: int = 100_000
    hash_buckets: int = 4096
    fuse: Literal["gate", "sum", "mlp"] = "gate"
    reads: Literal["live", "cached"] = "live"
    miss_rate: float = 0.1

    def __post_init__(self) -> None:
        if self.kind not in get_args(ModelKind):
            raise ValueError(f"model kind {self.kind!r} is none of {', '.join(get_args(ModelKind))}")
        unknown = [member for member in self.members if member not in get_args(Member)]
        if unknown or not self.members or len(set(self.members)) < len(self.members):
            raise ValueError(f"model.members must be some of {', '.join(get_args(Member))}, each once, "
                             f"got {', '.join(self.members) or 'none'}")
        _at_least(self, "model", dim=1, warm_start=0, cross_layers=0, negatives=0, popularity=0, interaction_layers=1,
                  block_fields=1, fm_rank=1, fusion_heads=1, queries=1, memory_rows=1, hash_buckets=1)
        for name in ("request_width", "candidate_width"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"model.{name} must be above 0, got {getattr(self, name)}")
        _shares(self, "model", "dropout", "unknown_rate", "embedding_dropout", "miss_rate")
        if not 0 < self.temperature < float("inf"):
            raise ValueError(f"model.temperature must be above 0, got {self.temperature}")

    @property
    def objective(self) -> Literal["ranking", "next_item"]:
        return "next_item" if self.kind == "next_item" else "ranking"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> ModelConfig:
        value = dict(value)
        value["encoder"] = EncoderConfig(**value["encoder"])
        for name in ("hidden", "fm_hidden", "members"):
            if name in value:
                value[name] = tuple(value[name])
        return cls(**value)
