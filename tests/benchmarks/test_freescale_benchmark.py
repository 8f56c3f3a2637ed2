"""The simulated step, small: where its waiting comes from, and what is left of it."""

import pytest

from benchmarks import freescale

OPTIONS = {"ranks": 4, "requests": 16, "steps": 1, "length": 21_000, "scale": 200, "collisions": 0.12, "exponent": None,
           "error": 0.0, "dim": 384, "cases": list(freescale.CASES)}


def test_waiting_is_split_and_both_cures_take_their_part(capsys):
    result = freescale.run(OPTIONS)
    cases = result["cases"]
    before, after = cases["unbalanced, blocking"], cases["balanced, prioritized"]
    for case in cases.values():
        split = case["split_s"]
        assert min(split.values()) >= 0 and case["straggler_s"] == split["straggler"]
        assert case["exposed_s"] == pytest.approx(sum(split[kind] for kind in freescale.EXPOSED))
        assert case["step_s"] == pytest.approx(freescale.COMPUTE_S + sum(split.values()))
    assert after["collisions"] == pytest.approx(0.12, abs=0.03)
    assert cases["balanced, blocking"]["straggler_s"] < 0.05 * before["straggler_s"]
    assert cases["unbalanced, prioritized"]["exposed_s"] < 0.4 * before["exposed_s"]
    assert after["less"] > 0.75 and after["faster"] > 1.1
    freescale.show(result)
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(cases)


def test_requests_that_take_other_than_modelled_leave_some_straggling():
    ends = [*freescale.CASES][1:2]
    exact, wrong = (freescale.plan({**OPTIONS, "error": error, "cases": ends}, balanced=True)[2]
                    for error in (0.0, 0.1))
    assert exact < 0.01 < wrong < 0.1


def test_a_share_that_no_popularity_gives_is_refused():
    with pytest.raises(ValueError, match="no popularity gives"):
        freescale.exponent_for({**OPTIONS, "collisions": 0.9})
