"""Step 4: two models from one store. One ranks the films of a sitting, one predicts the next film."""

from __future__ import annotations

from semel.cli import output
from semel.cli.demo.state import Demo


def step(demo: Demo) -> None:
    from semel.cli.train import Shown, fit, kept, outcome
    from semel.training import Trainer

    for kind in ("rank", "next"):
        recipe = demo.recipe(kind)
        demo.say(f"{recipe.name}: {recipe.model.kind}, at most {recipe.epochs} epochs")
        with output.progress_bar() as bar:
            run = fit(Trainer(recipe, on_progress=Shown(bar, indent="   ")))
        facts = outcome(run)
        demo.run[kind] = run.path
        demo.facts[f"{kind}_training"], demo.facts[f"{kind}_metrics"] = facts, run.metrics
        demo.say(f"{facts['epochs']} epochs in {facts['seconds']:.0f} s, {kept(facts)}")
