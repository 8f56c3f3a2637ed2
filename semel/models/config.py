"""What a model is, as data: enough, with its features and its weights, to build it again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

ModelKind = Literal["sequence_ranker", "dcnv2", "dlrm", "next_item"]


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
    (HSTU only)."""

    kind: Literal["hstu", "transformer"] = "hstu"
    dim: int = 64
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    dropout: float = 0.2
    positions: int = 201
    time: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ("hstu", "transformer"):
            raise ValueError(f"encoder kind {self.kind!r} is none of hstu, transformer")
        _at_least(self, "encoder", dim=1, layers=0, heads=1, head_dim=1, positions=1)
        _shares(self, "encoder", "dropout")


@dataclass(frozen=True)
class ModelConfig:
    """``kind``: which model. ``dim``: width of an embedding. ``encoder``: of sequence models. ``hidden``: widths of the
    head's layers. ``warm_start``: item tables begin at a factorization of which items meet within so many events (0: at
    random). ``cross_layers``: of DCNv2. ``history``: whether DCNv2 and DLRM see the pooled history.
    ``unknown_rate``: share of item ids hidden while training, so that the row for unknown items is trained too.
    ``embedding_dropout``, ``similarity`` of a state and an item, divided by ``temperature``, ``negatives`` (0: full
    softmax) and ``popularity`` (negatives drawn in proportion to count ** popularity; 0: uniform): of next-item
    models."""

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

    def __post_init__(self) -> None:
        if self.kind not in ("sequence_ranker", "dcnv2", "dlrm", "next_item"):
            raise ValueError(f"model kind {self.kind!r} is none of sequence_ranker, dcnv2, dlrm, next_item")
        _at_least(self, "model", dim=1, warm_start=0, cross_layers=0, negatives=0, popularity=0)
        _shares(self, "model", "dropout", "unknown_rate", "embedding_dropout")
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
        value["hidden"] = tuple(value["hidden"])
        return cls(**value)
