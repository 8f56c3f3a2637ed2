"""The README's code runs as printed, and what it points to exists."""

import doctest
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_of_the_readmes_parts_runs_alone_as_printed(tmp_path, monkeypatch):
    text = (ROOT / "README.md").read_text()
    blocks = [block for block in re.findall(r"```python\n(.*?)```", text, re.S) if block.startswith(">>>")]
    assert len(blocks) >= 5
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(blocks):
        test = doctest.DocTestParser().get_doctest(block, {}, f"README block {number}", "README.md", 0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
        runner.run(test)
        assert runner.summarize(verbose=False).failed == 0


def test_links_of_all_pages_lead_somewhere():
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("CONTRIBUTING.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} points to {target}"
    assert (ROOT / "LICENSE").exists()
