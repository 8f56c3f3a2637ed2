"""A search with everything that is said about it: baselines, what binds, what would change the answer, plain words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from semel.planning import baselines
from semel.planning.cluster import Cluster
from semel.planning.explorer import Outcome, Progress, explore
from semel.planning.job import Job
from semel.planning.options import Options
from semel.planning.plan import Plan, measured
from semel.planning.sensitivity import Choice, Flip, FlipMap, Gain, Turn, choices, families, family, flips, gains, turns
from semel.planning.sensitivity import flip_map as mapped

UNITS = {"time": "step time", "cost": "cost", "energy": "energy"}


@dataclass(frozen=True)
class Explained:
    """``baselines``: name -> plan, None where none of its kind fits. ``tried``: (conclusion, assumed coefficient) pairs
    behind ``flips``. ``words``: the same as sentences."""

    outcome: Outcome
    options: Options
    baselines: Mapping[str, Plan | None]
    gains: Sequence[Gain]
    choices: Sequence[Choice]
    flips: Sequence[Flip]
    tried: int
    turns: Sequence[Turn]
    map: FlipMap | None = None
    words: Sequence[str] = field(default=())

    @property
    def plans(self) -> list[Plan]:
        return self.outcome.plans

    def to_json(self) -> dict[str, Any]:
        """What ``semel plan search --json`` prints."""
        outcome = self.outcome
        return {
            "plans": [plan.to_json() for plan in outcome.plans], "objective": self.options.objective,
            "bound": outcome.bound, "gap": outcome.gap, "complete": outcome.complete, "nodes": outcome.nodes,
            "simulated": outcome.simulated, "shapes": outcome.shapes, "pruned": outcome.pruned,
            "baselines": {name: plan and plan.to_json() for name, plan in self.baselines.items()},
            "gains": [asdict(gain) for gain in self.gains], "choices": [asdict(choice) for choice in self.choices],
            "flips": [asdict(flip) for flip in self.flips], "flips_tried": self.tried,
            "turns": [asdict(turn) for turn in self.turns], "map": self.map and asdict(self.map),
            "words": list(self.words)}


def explain(cluster: Cluster, job: Job, options: Options | None = None, *, compare: bool = True, flip_map: bool = False,
            progress: Progress | None = None) -> Explained:
    """Search, then ask what the answer hangs on. ``compare``: run the baselines; the search begins with their plans, so
    that it is never worse. ``flip_map``: search again over distance x oversubscription of the outermost level.

    Raises what ``search`` raises.
    """
    options = options or Options()
    beside: dict[str, Plan | None] = {}
    for number, each in enumerate(baselines.BASELINES if compare else ()):
        beside[each.name] = baselines.run(each.name, cluster, job, replace(options, nodes=max(1, options.nodes // 8),
                                                                           simulations=max(
            1, options.simulations // 4)))
        if progress is not None:
            progress("baselines", number + 1, len(baselines.BASELINES))
    start = [plan.layout for plan in beside.values() if plan is not None]
    outcome = explore(cluster, job, options, start=start, progress=progress)
    winner, usual = outcome.plans[0], beside.get("production")
    others = families([*outcome.plans, *(plan for plan in beside.values() if plan is not None)])[1:]
    doubted, tried = flips(winner, [*others[:3], *([usual] if usual is not None else [])])
    drawn = None
    if flip_map and len(cluster.levels) > 1:
        drawn = mapped([*outcome.plans, *others], usual, options, progress=progress)
    found = Explained(outcome, options, beside, gains(winner), choices(winner, options), doubted, tried,
                      turns([winner, *others]), drawn)
    return replace(found, words=words(found))


def words(found: Explained) -> list[str]:
    """Why the winner wins and where it would not, in sentences."""
    plan, outcome = found.plans[0], found.outcome
    said = [f"Best: {plan.title}. {where(plan)} A step takes {duration(plan.seconds)} ({plan.mfu:.1%} of peak)."]
    said.append(_wins(found))
    binding = [gain for gain in found.gains if gain.share > 0.0005][:3]
    if binding:
        said.append("What binds: " + "; ".join(
            f"10 % better {gain.what} saves {gain.share:.1%}" + (" (today's value is a guess)" if gain.assumed else "")
            for gain in binding) + ".")
    matter = [choice for choice in found.choices if choice.loss > 0.001][:3]
    if matter:
        said.append("Choices that matter most: " + "; ".join(
            f"{choice.what} ({choice.chosen} over {choice.instead}: {choice.loss:+.1%})" for choice in matter) + ".")
    if found.turns:
        said.append("It would flip: " + "; ".join(
            f"at {turn.factor:.3g} times the {turn.what} {turn.to} would better cross the outermost level"
            for turn in found.turns) + ".")
    else:
        said.append("It does not flip to another placement within 32 times less or more bandwidth or delay of the "
                    "outermost "
                    "level, among the plans compared.")
    if found.tried:
        moved = list(dict.fromkeys(f"{flip.path} x {flip.factor:g}" for flip in found.flips))
        said.append(f"Of {found.tried} checks with an assumed coefficient moved by 30 %, {len(found.flips)} flip the "
                    "answer" + (
            f" to another of the plans compared: {', '.join(moved)}" if moved else "") + ".")
    if outcome.complete:
        said.append("The search is exact: nothing that the options allow is faster in this model.")
    else:
        said.append(f"The search was cut short by its limits: no plan can be more than {outcome.gap:.1%} better in "
                    f"{UNITS[found.options.objective]}.")
    if not plan.exact:
        said.append("This plan changes the optimization: it does not compute what synchronous training computes.")
    return said


def where(plan: Plan) -> str:
    """Which axes cross which levels, as a sentence."""
    levels: dict[tuple[str, ...], list[str]] = {}
    for level, axes in plan.crossing().items():
        levels.setdefault(axes, []).append(level)
    parts = [f"{' and '.join(axes)} cross{'es' if len(axes) == 1 else ''} the {' and '.join(names)} "
             f"level{'s' if len(names) > 1 else ''}" for axes, names in levels.items()]
    return (", ".join(parts) + ".") if parts else "Nothing leaves a device."


def _wins(found: Explained) -> str:
    plan = found.plans[0]
    rivals = {name: other for name, other in found.baselines.items() if other is not None}
    objective = found.options.objective
    mine = plan.value(objective)
    if not rivals:
        return "No baseline was run beside it."
    parts = [f"{1 - mine / other.value(objective):.1%} less than {name}" for name, other in rivals.items()]
    why = _why(plan, rivals.get("production"))
    return f"In {UNITS[objective]} it takes {', '.join(parts)}." + (f" {why}" if why else "")


def _why(plan: Plan, usual: Plan | None) -> str:
    """Where the difference to production comes from: the largest part of the step that shrank."""
    if usual is None or usual.seconds <= plan.seconds * 1.0005:
        return ""
    shrank = {f"{cause}": usual.bubble.get(cause, 0.0) - plan.bubble.get(cause, 0.0) for cause in {*plan.bubble,
                                                                                                   *usual.bubble}}
    shrank["computing"] = ((usual.seconds - sum(usual.bubble.values())) - (plan.seconds - sum(plan.bubble.values())))
    cause, seconds = max(sorted(shrank.items()), key=lambda item: item[1])
    if seconds <= 0:
        return ""
    return (f"Most of what production loses is {cause}: {duration(seconds)} of the "
            f"{duration(usual.seconds - plan.seconds)} "
            "between them" + ("." if seconds <= usual.seconds - plan.seconds else ", and other parts grew."))


@dataclass(frozen=True)
class Comparison:
    """``before``: the best plan now; ``kept``: its layout on the other side, None where it does not fit; ``after``: the
    best plan there."""

    before: Plan
    kept: Plan | None
    after: Plan
    words: Sequence[str]

    def to_json(self) -> dict[str, Any]:
        return {"before": self.before.to_json(), "kept": self.kept and self.kept.to_json(),
                "after": self.after.to_json(),
                "words": list(self.words)}


def what_if(cluster: Cluster, job: Job, to_cluster: Cluster, to_job: Job, options: Options | None = None, *,
            progress: Progress | None = None) -> Comparison:
    """The best plans of two clusters or jobs; the second search begins with the first one's plans."""
    options = options or Options()
    before = explore(cluster, job, options, progress=progress).plans
    after = explore(to_cluster, to_job, options, start=[plan.layout for plan in before], progress=progress).plans[0]
    best = before[0]
    try:
        kept: Plan | None = measured(to_cluster, to_job, best.layout)
    except (ValueError, KeyError):
        kept = None
    ratio = after.value(options.objective) / best.value(options.objective)
    said = [f"{best.job.name} on {best.cluster.name}: {duration(best.seconds)} a step; {after.job.name} on "
            f"{after.cluster.name}: {duration(after.seconds)}, {UNITS[options.objective]} {ratio - 1:+.1%}."]
    if kept is None:
        said.append("Today's plan does not run there.")
    else:
        gain = 1 - after.value(options.objective) / kept.value(options.objective)
        said.append(f"Today's plan kept as it is would take {duration(kept.seconds)} there; planning again saves "
                    f"{gain:.1%}.")
    said += [f"Now: {where(best)}", f"Then: {where(after)}"]
    if family(best.cluster, best.layout) != family(after.cluster, after.layout):
        said.append(f"What crosses the outermost level changes: {family(best.cluster, best.layout)} now, "
                    f"{family(after.cluster, after.layout)} then.")
    return Comparison(best, kept, after, said)


def duration(seconds: float) -> str:
    """For a person: 4.70 s, 312 ms, 45 us."""
    for scale, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"
