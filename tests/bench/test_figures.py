"""Samples, medians, and ratios pair by pair."""

from tiercache.bench.figures import Figures


def figures_of(**samples: list[float]) -> Figures:
    return Figures({name: list(values) for name, values in samples.items()})


def test_the_ratio_is_the_median_of_the_pairs_and_not_the_ratio_of_the_medians() -> None:
    figures = figures_of(ours=[1.0, 9.0, 10.0], ceiling=[2.0, 10.0, 10.0])
    figures.compare("ours", "ceiling")
    assert figures.to_dict()["ours"]["ratios"] == {"ceiling": 0.9}


def test_a_comparison_with_something_that_was_not_measured_has_no_ratio() -> None:
    figures = figures_of(ours=[1.0])
    figures.compare("ours", "peer")
    assert figures.to_dict()["ours"]["ratios"] == {"peer": None}
