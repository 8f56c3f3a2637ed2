"""A recipe: everything that decides a run, as one frozen dataclass, and how a file or a flag overrides its fields."""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from semel.features import FeatureSpec
from semel.models.config import ModelConfig


@dataclass(frozen=True)
class ExampleConfig:
    """How events become examples. ``name``: the example set under ``STORE/examples``.

    Ranking: a pause of more than ``gap_minutes`` begins a new request, a rating of ``like_threshold`` or more is a
    like, the last ``test_fraction`` of events by time test and ``validation_fraction`` before them validate;
    ``shuffle``: as of ``RequestLoader``.

    Next item: each user's last event tests, the one before it validates; users with fewer than ``min_events`` are left
    out; one with more than a history holds gives its last events, or a stretch that ends anywhere, with a chance that
    falls from ``earlier_windows`` to zero over the epochs. ``validate`` False: the event before the last is trained on
    too, as published leave-one-out runs do; nothing validates, so all epochs run and the last weights are kept.
    """

    name: str = "sessions"
    gap_minutes: float = 10.0
    like_threshold: float = 4.0
    validation_fraction: float = 0.1
    test_fraction: float = 0.1
    max_candidates: int | None = None
    shuffle: Literal["window", "full"] = "full"
    min_events: int = 3
    earlier_windows: float = 0.0
    validate: bool = True

    def __post_init__(self) -> None:
        for name in ("validation_fraction", "test_fraction", "earlier_windows"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"examples.{name} must be from 0 to 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a linear warm-up over ``warmup_steps``, then constant, or falling to zero at the last step: linearly,
    or as half a cosine."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.98
    warmup_steps: int = 100
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    clip_norm: float = 5.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay", "warmup_steps", "clip_norm"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"optimizer.{name} must be 0 or more and finite, got {getattr(self, name)}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be from 0 to below 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class MemoryConfig:
    """Of a model with an item memory. ``pool``: items of the catalogue that are computed beside each step, those
    without a row first, then the oldest rows. Changes are published every ``interval`` seconds while a run follows, to
    ``url`` (None: the folder ``memory`` of the run), with a snapshot every ``snapshot_every`` of them, of which
    ``keep`` stay: so far back what was served can be replayed."""

    pool: int = 64
    interval: float = 1.0
    snapshot_every: int = 600
    keep: int = 4
    url: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("pool", 0), ("snapshot_every", 1), ("keep", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"memory.{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.interval < float("inf"):
            raise ValueError(f"memory.interval must be above 0 and finite, got {self.interval}")


@dataclass(frozen=True)
class ShardingConfig:
    """Tables whose rows are shared by ranks while a model trains: ``tables`` are names of features (of an early ranker
    those of the request and its history that are none of an item; of a next-item model the item only where negatives
    are sampled: they are then drawn once a step, for all pieces, and not by each piece).

    Their rows are trained by an ``optimizer`` of their own, at ``learning_rate`` (None: the recipe's) with the recipe's
    warm-up, schedule and betas: one that leaves alone rows that a step does not use, without weight decay, outside
    ``clip_norm``. ``schedule``: when rows and gradients travel (``semel.training.embedding``); the results are the
    same."""

    tables: tuple[str, ...] = ()
    schedule: Literal["prioritized", "blocking"] = "prioritized"
    optimizer: Literal["adam", "row_wise_adagrad", "sgd"] = "adam"
    learning_rate: float | None = None

    def __post_init__(self) -> None:
        if len(set(self.tables)) < len(self.tables):
            raise ValueError(f"sharding.tables names one twice: {', '.join(self.tables)}")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise ValueError(f"sharding.learning_rate must be above 0 and finite, or none, got {self.learning_rate}")


@dataclass(frozen=True)
class Recipe:
    """``batch``: requests of a step (ranking) or users of a step (next item). ``patience``: stop after so many
    validations without a better one, and keep the best weights. ``validate_every``: epochs between validations.
    ``checkpoint_steps``: steps between checkpoints beside the one at the end of each epoch. ``pieces``: parts of a
    batch that are computed side by side, as many at a time as there are threads, and shared out over ranks; the loss is
    the mean over their samples. ``accumulate_tokens``: an update is made of successive batches while they keep history
    events + candidates within so many (None: of one batch). ``precision``: in which numbers the model computes;
    weights, gradients and losses are float32. ``overlap``: prepare the next batches while one computes (the losses are
    the same). ``balance``: which rank and thread computes which request, so that none waits for the longest
    histories: a partition of ``semel.training.balance`` by cost, where t events and candidates cost
    ``t + quadratic t^2``; "none" leaves requests in their order and cuts it evenly. ``costs``: "given", so; "fit", by
    what steps took, from the second epoch on; or the folder of a run that fitted them, to repeat it
    (``semel.training.tuning``). ``sharding``: which tables are shared by ranks, in place of a copy on each.
    ``keep_versions``: of the models
    that a run saves the last so many stay, so that what they served can be replayed; a run that follows saves one every
    ``version_seconds``, or at its checkpoints where they come sooner."""

    name: str
    features: FeatureSpec = FeatureSpec()
    model: ModelConfig = ModelConfig()
    examples: ExampleConfig = ExampleConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    epochs: int = 10
    batch: int = 64
    pieces: int = 2
    seed: int = 0
    patience: int = 3
    validate_every: int = 1
    checkpoint_steps: int = 1000
    accumulate_tokens: int | None = None
    precision: Literal["float32", "bfloat16"] = "float32"
    overlap: bool = True
    balance: Literal["none", "equal_count", "equal_cost", "zigzag", "segments", "karmarkar_karp", "lpt"] = "none"
    quadratic: float = 0.0
    costs: str = "given"
    memory: MemoryConfig = MemoryConfig()
    sharding: ShardingConfig = ShardingConfig()
    keep_versions: int = 10
    version_seconds: float = 60.0
    store: str = "./store"
    out: str = "./runs"

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "pieces", "patience", "validate_every", "checkpoint_steps",
                     "accumulate_tokens", "keep_versions"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"recipe {self.name!r}: {name} must be at least 1, got {getattr(self, name)}")

        if self.sharding.tables:
            if self.model.objective == "next_item" and not self.model.negatives and \
                    self.features.item in self.sharding.tables:
                raise ValueError(f"recipe {self.name!r}: model.negatives is 0, the full softmax, which compares with "
                                 f"every item in every step: each process would fetch the whole table of "
                                 f"{self.features.item!r}; set model.negatives to a number, or take it out of "
                                 f"sharding.tables")
            if self.model.kind == "early_ranker":
                tower = {self.features.item, *(feature.name for feature in self.features.candidate)}
                for name in sorted(tower.intersection(self.sharding.tables)):
                    raise ValueError(f"recipe {self.name!r}: sharding.tables names {name!r}, from which an "
                                     f"early_ranker's tower computes items of the whole catalogue, whatever a batch "
                                     f"names; name only tables of what is known of the request")
            if self.accumulate_tokens is not None:
                raise ValueError(f"recipe {self.name!r}: sharding.tables fetches rows batch by batch, each of which "
                                 f"must be an update; set accumulate_tokens to none, or sharding.tables to nothing")
        if not self.version_seconds > 0:
            raise ValueError(f"recipe {self.name!r}: version_seconds must be above 0, got {self.version_seconds}")
        if not 0 <= self.quadratic < float("inf"):
            raise ValueError(f"recipe {self.name!r}: quadratic must be 0 or more and finite, got {self.quadratic}")

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Recipe:
        return _build(cls, value, "")


def override(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """``recipe`` with some fields replaced: a nested mapping (of a TOML file), or dotted names to values or to text as
    the command line gives it. Raises ValueError for a field that does not exist (naming the nearest one) or a value of
    another type."""
    for name, value in _flatten(values).items():
        recipe = _replace(recipe, name.split("."), value, name)
    return recipe


def read_overrides(path: str | Path) -> dict[str, Any]:
    """A TOML file of recipe fields. FileNotFoundError, or ValueError with the place of a syntax error."""
    try:
        return tomllib.loads(Path(path).read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
    except FileNotFoundError:
        raise FileNotFoundError(f"{path}: no such file") from None


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = value
    return flat


def _replace(value: Any, path: list[str], new: Any, full: str) -> Any:
    names = [f.name for f in dataclasses.fields(value)]
    if path[0] not in names:
        close = difflib.get_close_matches(path[0], names, n=1, cutoff=0.0)
        raise ValueError(f"unknown field {full!r}: there is no {path[0]!r} here; the nearest is {close[0]!r}")
    hint = typing.get_type_hints(type(value))[path[0]]
    if len(path) > 1:
        inner = getattr(value, path[0])
        if not dataclasses.is_dataclass(inner):
            raise ValueError(f"unknown field {full!r}: {path[0]!r} has no fields")
        return dataclasses.replace(value, **{path[0]: _replace(inner, path[1:], new, full)})
    return dataclasses.replace(value, **{path[0]: _coerce(hint, new, full)})


def _build(cls: type[Any], value: Mapping[str, Any], where: str) -> Any:
    """A dataclass from JSON, its nested dataclasses and tuples too."""
    hints = typing.get_type_hints(cls)
    unknown = set(value) - set(hints)
    if unknown:
        raise ValueError(f"unknown field {where}{sorted(unknown)[0]!r} in a saved recipe")
    return cls(**{name: _coerce(hints[name], item, where + name) for name, item in value.items()})


def _coerce(hint: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``hint`` says; text is parsed (the command line knows no types)."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            if type(None) in arguments:
                return None
            raise ValueError(f"{where} cannot be none")
        return _coerce(next(a for a in arguments if a is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be one of {', '.join(map(str, arguments))}, got {value!r}")
        return value
    if origin is tuple:
        if isinstance(value, str):
            value = [part.strip(" '\"") for part in value.strip("()[] ").split(",") if part.strip()]
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{where} must be a list, got {value!r}")
        return tuple(_coerce(arguments[0], item.strip() if isinstance(item, str) else item, where) for item in value)
    if dataclasses.is_dataclass(hint):
        if isinstance(value, Mapping):
            return _build(hint, value, where + ".")  # type: ignore[arg-type]
        raise ValueError(f"{where} must be a table of fields, got {value!r}")
    return _scalar(hint, value, where)


def _scalar(hint: Any, value: Any, where: str) -> Any:
    wrong = ValueError(f"{where} must be {hint.__name__}, got {value!r}")
    if hint is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise wrong
    if isinstance(value, bool):
        raise wrong
    if hint is int and isinstance(value, float) and not value.is_integer():
        raise wrong
    if hint is str and not isinstance(value, str):
        raise wrong
    try:
        return hint(value)
    except (TypeError, ValueError):
        raise wrong from None


