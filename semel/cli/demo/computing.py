"""Step 7: the same requests with the model's request side computed once, and once for every candidate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.cli.demo.serving import Ask, draw
from semel.cli.demo.state import Demo

if TYPE_CHECKING:
    from semel.serving import Predictor, RankResult

REQUESTS = 10
QUICK_REQUESTS = 3


def step(demo: Demo) -> None:
    import numpy as np

    from semel.examples import open_examples
    from semel.history import HistoryStore
    from semel.serving import Predictor

    rows = open_examples(demo.store, demo.facts["examples"]["set"]).rows("test")
    with HistoryStore.open(demo.store / "catalogue") as catalogue:
        items = catalogue.keys()
    asks = list(draw(rows, items, QUICK_REQUESTS if demo.quick else REQUESTS, seed=1))
    once: list[float] = []
    again: list[float] = []
    each: list[float] = []
    difference = 0.0

    def load(share: bool) -> Predictor:
        return Predictor.load(demo.run["rank"], demo.store, log_exposures=False, share=share)

    with load(True) as sharing, load(False) as broadcasting:
        sharing.warm_up()
        broadcasting.rank(asks[0].user_id, asks[0].candidates[:10], asks[0].context, as_of=asks[0].as_of)
        for ask in asks:
            first, second, copied = _rank(sharing, ask), _rank(sharing, ask), _rank(broadcasting, ask)
            for times, result in ((once, first), (again, second), (each, copied)):
                times.append(result.timings_ms["total"])
            shared = dict(first.results)
            difference = max(difference, *(abs(score - shared[item]) for item, score in copied.results))
        if sharing.states.hits < len(asks):
            raise RuntimeError(f"{sharing.states.hits} of {len(asks)} request states were kept for a second page")
    once_ms, again_ms, each_ms = (float(np.median(times)) for times in (once, again, each))
    demo.facts["computed"] = {
        "requests": len(asks), "candidates": len(asks[0].candidates), "once_ms": once_ms, "kept_ms": again_ms,
        "per_candidate_ms": each_ms, "ratio": each_ms / once_ms, "max_difference": difference}
    demo.say(f"a request takes {once_ms:.1f} ms with its side computed once, {again_ms:.1f} ms where that was kept, "
             f"{each_ms:.0f} ms with it computed for each of {len(asks[0].candidates)} candidates; scores differ by "
             f"{difference:.1g}")


def _rank(predictor: Predictor, ask: Ask) -> RankResult:
    return predictor.rank(ask.user_id, ask.candidates, ask.context, as_of=ask.as_of)
