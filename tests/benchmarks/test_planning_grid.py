"""The planner's benchmark: its grid, its distribution, and the step of 100,000 devices."""

from itertools import product

from benchmarks import planning


def test_the_grid_has_over_200_points_of_1024_devices():
    assert len(list(product(planning.MODELS, planning.BUILDINGS, planning.DISTANCES, planning.RATIOS))) >= 200
    for buildings, distance, ratio in product(planning.BUILDINGS, planning.DISTANCES, planning.RATIOS):
        assert planning.place(buildings, distance, ratio).devices == planning.DEVICES


def test_the_distribution_is_of_shares():
    rows = [{"ours": 1.0, "theirs": theirs} for theirs in (1.0, 2.0, 4.0, None)]
    shares = planning.less(rows, "ours", "theirs")
    assert (shares["points"], shares["least"], shares["median"], shares["most"]) == (3, 0.0, 0.5, 0.75)
    assert planning.less([], "ours", "theirs") == {"points": 0}


def test_a_step_of_100000_devices_costs_its_distinct_stages():
    part = planning.simulation_part()
    assert part["devices"] > 100_000 and part["cpu_seconds"] <= 5 and part["operations"] < 10_000
