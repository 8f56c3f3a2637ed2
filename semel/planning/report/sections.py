"""The sections of a plan's page: words, table, timeline, memory, links, trade-offs, sensitivity, the flip map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semel.planning.explain import duration
from semel.planning.report import figures
from semel.planning.report.page import Card, Grid, Page, Section

if TYPE_CHECKING:
    from semel.planning.explain import Explained
    from semel.planning.plan import Plan


def page(found: Explained) -> Page:
    """The whole page. Simulates the winner and production once more, for their timelines."""
    best = found.plans[0]
    usual = found.baselines.get("production")
    beside = {"winner": best, **({"production": usual} if usual is not None else {})}
    traces = {name: plan.trace() for name, plan in beside.items()}
    levels = [level.name for level in best.cluster.levels]
    sections = [
        _why(found),
        Section("Timeline", ["What each pipeline stage does in one step; one stage stands for all devices that do the "
                             "same. "
                             "Below each stage, thin, are its transfers. Drag to move, double click or hold Shift and "
                             "turn "
                             "the wheel to zoom."], timeline=True),
        Section("Where the step goes", ["A bubble is time in which a device computes nothing: the pipeline fills and "
                                        "drains, "
                                        "stages differ (straggler), or bytes are waited for."],
                [figures.bubbles({name: plan for name, plan in ({**beside, **_others(found)}).items()})]),
        Section("Memory and links", [], [figures.memory(traces["winner"], best.limit),
                                         figures.load_over_time(traces["winner"], levels),
                                         figures.load_bars(beside, [name for name in levels if any(
                                             plan.traffic.get(name) for plan in beside.values())])]),
        Section("Trade-offs", ["Each dot is a plan that was simulated: to the left is faster, further down takes less "
                               "memory, "
                               "and a larger dot sends more across the outermost level."],
                [figures.scatter(found.plans, {name: plan for name, plan in found.baselines.items()
                                               if plan is not None},
                                 levels[-1])]),
        _sensitivity(found),
    ]
    if found.map is not None:
        drawn = found.map
        sections.append(Section(
            "Where it flips", ["The best plan searched again over the distance and oversubscription of the "
                               f"{levels[-1]} level. "
                               "The colour says which axes cross it; the number how much shorter the step is than "
                               "production's "
                               "there."],
            [figures.flip_map(drawn.distances, drawn.ratios, drawn.winners, drawn.gains, drawn.titles)]))
    sections.append(_doubts(found))
    from semel import __version__

    return Page(
        f"{best.job.name} on {best.cluster.name}", f"{best.layout.devices:,} devices. {best.title}.", _cards(found),
        sections,
        [figures.timeline(f"{name}: {beside[name].title}", trace) for name, trace in traces.items()],
        {"job": best.job.description or best.job.name, "cluster": best.cluster.description or best.cluster.name,
         "search": f"{found.outcome.shapes:,} shapes, {found.outcome.nodes:,} layouts estimated, "
                   f"{found.outcome.simulated} "
                   f"simulated, gap {found.outcome.gap:.1%}", "semel": __version__})


def _others(found: Explained) -> dict[str, Plan]:
    return {name: plan for name, plan in found.baselines.items() if plan is not None and name != "production"}


def _cards(found: Explained) -> list[Card]:
    best, usual = found.plans[0], found.baselines.get("production")
    exposed = sum(seconds for levels in best.exposed.values() for seconds in levels.values())
    cards = [
        Card("step", duration(best.seconds), f"production takes {duration(usual.seconds)}" if usual is not None else
             f"closed form: {duration(best.estimate)}"),
        Card("model FLOPs of peak", f"{best.mfu:.1%}", f"{best.layout.devices:,} x {best.cluster.device.name}"),
        Card("memory", f"{best.peak_memory / 1e9:.0f} GB", f"of {best.limit / 1e9:.0f} GB a device"),
        Card("waiting for bytes", f"{exposed / best.seconds:.1%}", "of the step, mean over stages"),
    ]
    if best.cost:
        cards.append(Card("cost", f"${best.cost:.4g}", f"a step; {best.energy / 3.6e6:.3g} kWh"))
    return cards


def _why(found: Explained) -> Section:
    rows = [_row(str(number), plan) for number, plan in enumerate(found.plans, start=1)]
    rows += [_row(name, plan) for name, plan in found.baselines.items() if plan is not None]
    return Section("Why this plan", list(found.words), grid=Grid(
        ["", "step", "MFU", "$ a step", "GB", "bubble", "exposed", "plan"], rows, frozenset({0}), frozenset({7})))


def _row(name: str, plan: Plan) -> list[str]:
    exposed = sum(seconds for levels in plan.exposed.values() for seconds in levels.values())
    bubble = max(0.0, sum(seconds for cause, seconds in plan.bubble.items() if cause != "exposed communication"))
    return [name, duration(plan.seconds), f"{plan.mfu:.1%}", f"{plan.cost:.4g}", f"{plan.peak_memory / 1e9:.1f}",
            f"{bubble / plan.seconds:.1%}", f"{exposed / plan.seconds:.1%}", plan.title]


def _sensitivity(found: Explained) -> Section:
    rows = [(gain.what, max(0.0, gain.share), "today's value is a guess" if gain.assumed else "")
            for gain in found.gains
            if gain.share > 2e-4 or gain is found.gains[0]]
    grid = Grid(["choice", "chosen", "next best", "longer by"], [
        [choice.what, choice.chosen, choice.instead, f"{choice.loss:+.2%}"] for choice in found.choices],
        prose=frozenset({1, 2}))
    return Section("What binds", ["How much shorter the step gets when one thing is 10 % better and the plan stays; "
                                  "in the "
                                  "second colour where today's value is a guess. Below, what each choice would cost "
                                  "if it were "
                                  "made otherwise."],
                   [figures.gains(rows[:14], "What 10 % more is worth")], grid if found.choices else None)


def _doubts(found: Explained) -> Section:
    text = [f"{found.tried} times an assumed coefficient was moved by 30 % and two plans compared again; "
            f"{len(found.flips)} times the order of the two changed."]
    if not found.flips:
        return Section("What hangs on a guess", text)
    return Section("What hangs on a guess", text, grid=Grid(
        ["coefficient", "times", "conclusion that no longer holds", "assumed because", "winner", "other"],
        [[flip.path, f"{flip.factor:g}", flip.conclusion, flip.why_assumed, duration(flip.seconds[0]),
          duration(flip.seconds[1])]
         for flip in found.flips], prose=frozenset({2, 3})))
