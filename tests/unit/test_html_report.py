"""The report of a sweep: one file that needs nothing else, with charts that say what they show."""

import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from router.simulation.generators import Shape, multi_turn_chat
from router.simulation.html import html_report
from router.simulation.presets import get_preset
from router.simulation.svg import Axis, Line, Style, line_chart, number
from router.simulation.sweep import Run, Sweep, run_sweep

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def sweep() -> Sweep:
    trace = replace(multi_turn_chat(Shape(requests=60, per_second=30)), name="<odd> & name")
    return Sweep(
        trace,
        get_preset("llama-70b"),
        nodes=3,
        bandwidths_bytes_per_s=(2e9, 8e9),
        policies=("kvpool", "mooncake", "round_robin"),
        rates=(1.0, 3.0),
    )


@pytest.fixture(scope="module")
def runs(sweep: Sweep) -> list[Run]:
    return list(run_sweep(sweep))


@pytest.fixture(scope="module")
def page(sweep: Sweep, runs: list[Run]) -> str:
    return html_report(sweep, runs)


def charts(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def words(chart: ET.Element) -> str:
    return " | ".join("".join(item.itertext()) for item in chart.iter(f"{SVG}text"))


def test_the_page_needs_no_script_and_no_other_host(page: str) -> None:
    bare = page.replace("http://www.w3.org/2000/svg", "")
    assert "http" not in bare
    assert not re.search(r"<script|<link|<iframe|<img|\bsrc=|@import|url\(", bare)


def test_names_from_outside_are_escaped(page: str) -> None:
    assert "<odd>" not in page
    assert "&lt;odd&gt; &amp; name" in page


def test_every_chart_is_well_formed_and_its_axes_carry_labels_with_units(page: str) -> None:
    found = charts(page)
    # regret, goodput per bandwidth, TTFT per rate, and four in each of four cells
    assert len(found) == 1 + 2 + 2 + 4 * 4
    for chart in found:
        assert re.search(r"\((%|s[,)]|1/s|GB/s|good requests/s)|in units of a fair share", words(chart)), words(chart)
        assert chart.find(f"{SVG}title") is not None


def test_every_kind_of_chart_is_there_and_names_every_policy(page: str) -> None:
    for kind in (
        "Cumulative distribution",
        "Goodput against",
        "Hit rate",
        "Plan mix",
        "Load share",
        "Regret",
        "bandwidth",
    ):
        shown = [chart for chart in charts(page) if kind in (chart.findtext(f"{SVG}title") or "")]
        assert shown, kind
        assert all(name in words(chart) for chart in shown for name in ("kvpool", "mooncake", "round_robin"))


def test_every_coordinate_lies_inside_its_chart(page: str) -> None:
    for chart in charts(page):
        _, _, width, height = map(float, chart.attrib["viewBox"].split())
        for item in chart.iter(f"{SVG}circle"):
            assert 0.0 <= float(item.attrib["cx"]) <= width
            assert 0.0 <= float(item.attrib["cy"]) <= height
        for item in chart.iter(f"{SVG}rect"):
            assert float(item.attrib["x"]) >= 0.0
            assert float(item.attrib["x"]) + float(item.attrib["width"]) <= width
    assert not re.search(r"\b(nan|inf)\b", page)


def test_the_same_runs_give_the_same_page(sweep: Sweep, runs: list[Run], page: str) -> None:
    assert html_report(sweep, runs) == page


def test_a_cell_that_ours_loses_is_listed_with_what_differs(sweep: Sweep, runs: list[Run]) -> None:
    worse = [
        replace(run, report=replace(run.report, ttft_mean_ms=1e6)) if run.report.policy == "kvpool" else run
        for run in runs
    ]
    page = html_report(sweep, worse)
    assert "Where ours loses, and what differs there" in page
    assert "mean TTFT" in page


def test_one_policy_with_one_rate_and_unanswered_requests_still_makes_a_page(sweep: Sweep, runs: list[Run]) -> None:
    small = replace(sweep, policies=("random",), rates=(1.0,), bandwidths_bytes_per_s=(2e9,))
    report = replace(
        runs[0].report, policy="random", ttft_ms=(), unfinished=60, ttft_mean_ms=0.0, goodput_rps=0.0, plans={}
    )
    page = html_report(small, [Run(report, 30.0, (0, 0, 0))])
    assert len(charts(page)) == 1 + 4
    assert "60 unanswered" in page


@pytest.mark.parametrize(
    ("low", "high", "log"), [(0, 1, False), (0, 7e6, False), (0.0013, 250, True), (3, 3.1, True), (0, 0, False)]
)
def test_ticks_are_few_and_inside_the_axis(low: float, high: float, log: bool) -> None:
    ticks = Axis("time (s)", low, high, log).ticks()
    assert len(ticks) <= 14
    assert all(low * 0.999 <= tick <= high * 1.001 for tick in ticks)


def test_values_outside_an_axis_are_drawn_at_its_end() -> None:
    axis = Axis("time (s)", 1.0, 10.0, log=True)
    assert (axis.place(0.0), axis.place(1.0), axis.place(10.0), axis.place(1e9)) == (0.0, 0.0, 1.0, 1.0)


def test_a_line_without_points_is_left_out_but_stays_in_the_legend() -> None:
    axis = Axis("time (s)", 0.0, 1.0)
    assert "empty" in line_chart("title", axis, axis, [Line("empty", (), Style("#000"))])


def test_numbers_are_short_and_without_exponents() -> None:
    assert [number(value) for value in (0.0, 0.0123, 1.5, 123.4, 1234567.0)] == [
        "0",
        "0.0123",
        "1.5",
        "123",
        "1,234,567",
    ]
