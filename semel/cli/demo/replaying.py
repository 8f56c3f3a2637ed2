"""Step 9: every request that was served, scored again as training would."""

from __future__ import annotations

from semel.cli import output
from semel.cli.demo.state import Demo


def step(demo: Demo) -> None:
    from semel.serving import replay

    with output.progress_bar() as bar:
        steps = output.Steps(bar)
        report = replay(demo.run["rank"], demo.store, progress=lambda done, total: steps("replay", done, total))
    demo.facts["replay"] = report.to_json()
    demo.say(f"{report.histories_equal:,} of {report.requests:,} histories equal, {report.bit_equal:,} bit-equal in "
             f"every score, largest difference {report.max_difference:g}")
    if not report.exact:
        raise RuntimeError(f"the replay differs from what was served: {report.to_json()}")
