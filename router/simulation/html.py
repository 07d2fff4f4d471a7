"""The report of a sweep as one HTML page: charts as inline SVG, no script, nothing from another host.  (pure)

Order: what was run, who is best where and where ours loses, goodput against request rate, TTFT against bandwidth,
then every cell with its TTFT distribution, hits, plans and load shares, then all numbers. The same runs give the
same page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from html import escape

from router.simulation.cluster import Faults
from router.simulation.svg import Axis, Line, Rule, Style, line_chart, number, stacked_bars, strip_chart
from router.simulation.sweep import OURS, TUNED, Loss, Run, Sweep, best_of, cells, losses, regret

_COLOURS = ("#d55e00", "#009e73", "#8a6400", "#cc79a7", "#3aa0d8", "#7a5195", "#5f6b6d", "#8c564b")
_DASHES = ("", "7 3", "2 3", "9 3 2 3")
_PLANS = (("redo", "#c9ced6"), ("load", "#3aa0d8"), ("split", "#0b4f9e"))
_HITS = (("cached on the node", "#009e73"), ("loaded from a peer", "#3aa0d8"))
_CDF_POINTS = 160
_MAX_REGRET = 2.0
_MAX_SHARE = 6.0
_MAX_SPAN = 30.0
_MANY_NODES = 128
_TIE = 0.02

_STYLE = """
:root{color-scheme:light}body{font:15px/1.5 system-ui,sans-serif;color:#222;margin:2rem auto;max-width:1180px;
padding:0 1.2rem}h1{font-size:1.6rem;margin:0 0 .3rem}h2{margin:2.4rem 0 .4rem;font-size:1.25rem;
border-bottom:2px solid #0b4f9e;padding-bottom:.2rem}h3{margin:1rem 0 .2rem;font-size:1rem}p{margin:.4rem 0;
max-width:75ch}svg{width:100%;height:auto;display:block}.grid{display:grid;grid-template-columns:1fr 1fr;
gap:1rem 1.6rem}figure{margin:0;break-inside:avoid;max-width:640px}figcaption{font-weight:600;margin:.6rem 0 .2rem}
table{border-collapse:collapse;font-size:13px;margin:.5rem 0;font-variant-numeric:tabular-nums}.wide{overflow-x:auto}
th,td{padding:.22rem .6rem;border-bottom:1px solid #ddd;text-align:right;white-space:nowrap}
th{white-space:normal;max-width:9em}
th:first-child,td:first-child{text-align:left}thead th{border-bottom:2px solid #888;vertical-align:bottom}
td.best{font-weight:700}dl{display:grid;grid-template-columns:max-content 1fr;gap:.1rem 1rem;margin:.6rem 0}
dt{color:#666}dd{margin:0}.ours td:first-child{font-weight:700}
@media screen and (max-width:800px){.grid{grid-template-columns:1fr}}
@media print{body{margin:0;max-width:none;font-size:11px}h2,h2+p{break-after:avoid}.cell{break-before:page}
.wide{overflow:visible}table{font-size:9px}th,td{padding:.12rem .3rem}*{print-color-adjust:exact;
-webkit-print-color-adjust:exact}@page{size:A4 landscape;margin:12mm}}
"""


def html_report(sweep: Sweep, runs: Sequence[Run]) -> str:
    """The whole page. ``runs`` are those of the sweep, at least one."""
    styles = _styles(sweep.policies)
    grouped = cells(list(runs))
    parts = [
        _head(sweep),
        _verdict(sweep, list(runs)),
        _goodput(sweep, runs, styles),
        _against_bandwidth(sweep, runs, styles),
        *(_cell(sweep, group, styles) for group in grouped.values()),
        _numbers(runs),
        _reading(),
    ]
    title = escape(f"kvpool simulation: {sweep.trace.name}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(part for part in parts if part) + "\n</body></html>\n"
    )


def _styles(policies: Sequence[str]) -> dict[str, Style]:
    """Ours is the thick blue line; the others differ in colour, then in dash."""
    styles = {OURS: Style("#0b4f9e", "", 3.0), TUNED: Style("#0b4f9e", "5 3", 3.0)}
    rest = [name for name in policies if name not in styles]
    for place, name in enumerate(rest):
        dash = _DASHES[(place // len(_COLOURS) + place) % len(_DASHES)]
        styles[name] = Style(_COLOURS[place % len(_COLOURS)], dash)
    return styles


def _head(sweep: Sweep) -> str:
    trace, preset = sweep.trace, sweep.preset
    rates = ", ".join(f"×{rate:g} ({number(sweep.offered_rps(rate))} requests/s)" for rate in sweep.rates)
    facts = {
        "Trace": f"{trace.name}: {len(trace):,} requests in {trace.duration_ns / 6e10:.1f} min, "
        f"{trace.prompt_tokens / max(1, len(trace)):,.0f} prompt tokens each on average",
        "Cluster": f"{sweep.nodes} nodes of preset {preset.name}, {preset.capacity_blocks:,} KV blocks of "
        f"{trace.block_tokens} tokens each",
        "Routers": str(sweep.routers),
        "Bandwidth": ", ".join(f"{value / 1e9:g}" for value in sweep.bandwidths_bytes_per_s)
        + f" GB/s per node and direction; loading 8,192 tokens takes as long as redoing them at "
        f"{preset.b_star_bytes_per_s() / 1e9:.2f} GB/s",
        "Request rates": rates,
        "Limits": f"TTFT {preset.ttft_slo_ns / 1e9:g} s, TPOT {preset.tpot_slo_ns / 1e6:g} ms; a request that meets "
        "both is good",
        "Faults": _faults(sweep.faults),
        "Seed": str(sweep.seed),
    }
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<h1>Routing policies on {escape(trace.name)}</h1><dl>{listed}</dl>"


def _faults(faults: Faults) -> str:
    normal = Faults()
    shown = [
        f"{item.name} {getattr(faults, item.name)}"
        for item in fields(faults)
        if getattr(faults, item.name) != getattr(normal, item.name)
    ]
    return ", ".join(shown) or "none"


def _verdict(sweep: Sweep, runs: list[Run]) -> str:
    """Mean TTFT of every policy in every cell, and the cells in which ours is not the best."""
    grouped = cells(runs)
    header = "".join(f"<th>{gbytes:g} GB/s<br>×{rate:g}</th>" for gbytes, rate in grouped)
    rows = []
    for name in sweep.policies:
        entries = "".join(_verdict_entry(name, group) for group in grouped.values())
        rows.append(f"<tr{_row_class(name)}><td>{escape(name)}</td>{entries}</tr>")
    lost = [loss for name in (OURS, TUNED) for loss in losses(runs, name, _TIE)]
    return (
        "<h2>Mean TTFT, and who is best</h2>"
        "<p>Seconds, lower is better; the darker, the further behind the best policy of the same column (bold).</p>"
        f'<div class="wide"><table><thead><tr><th>policy</th>{header}</tr></thead><tbody>{"".join(rows)}</tbody>'
        f"</table></div>{_regret_chart(sweep, grouped)}{_losses(sweep, lost)}"
    )


def _verdict_entry(name: str, group: list[Run]) -> str:
    run = next((item for item in group if item.report.policy == name), None)
    if run is None:
        return "<td>–</td>"
    behind = regret(run, group)
    shade = min(1.0, behind / 1.0) * 0.55
    bold = ' class="best"' if run is best_of(group) else ""
    missing = f" ({run.report.unfinished} unanswered)" if run.report.unfinished else ""
    value = f"{run.report.ttft_mean_ms / 1e3:.3f}{missing}"
    return f'<td{bold} style="background:rgba(213,94,0,{shade:.2f})">{value}</td>'


def _regret_chart(sweep: Sweep, grouped: dict[tuple[float, float], list[Run]]) -> str:
    if len(sweep.policies) < 2:
        return ""
    rows = []
    for name in sweep.policies:
        values = [regret(run, group) for group in grouped.values() for run in group if run.report.policy == name]
        mean, worst = sum(values) / max(1, len(values)), max(values, default=0.0)
        rows.append((name, (100 * mean, 100 * (worst - mean))))
    most = max(sum(values) for _, values in rows)
    chart = stacked_bars(
        "Regret by policy",
        rows,
        (("mean over all cells", "#d55e00"), ("up to the worst cell", "#f6cfae")),
        Axis(
            "mean TTFT above that of the cell's best policy (%; bars end at 200)",
            0.0,
            min(100 * _MAX_REGRET, max(5.0, most)),
        ),
        lambda values: f"{_percent(values[0])} / {_percent(sum(values))} %",
    )
    return _figure("Regret against the best policy of each cell (mean / worst)", chart)


def _percent(value: float) -> str:
    return f"{value:.1f}" if value < 100.0 else f"{value:.0f}" if value < 1000.0 else ">999"


def _losses(sweep: Sweep, lost: list[Loss]) -> str:
    if not any(name in sweep.policies for name in (OURS, TUNED)) or len(sweep.policies) < 2:
        return ""
    if not lost:
        return (
            f"<h3>Where ours loses</h3><p>In no cell by more than {_TIE:.0%}, be it mean TTFT, p99 TTFT or goodput.</p>"
        )
    header = (
        "policy",
        "cell",
        "best",
        "behind in",
        "by",
        "hit share",
        "tokens loaded",
        "busiest node × fair",
        "goodput (1/s)",
        "TPOT mean (ms)",
        "median prediction error",
    )
    rows = []
    for loss in lost:
        ours, best = loss.run.report, loss.best.report
        rows.append(
            (
                ours.policy,
                f"{ours.bandwidth_gbytes_per_s:g} GB/s, ×{ours.rate:g}",
                best.policy,
                loss.measure.title,
                f"{loss.behind:.1%}",
                f"{ours.hit_share:.1%} vs {best.hit_share:.1%}",
                f"{ours.loaded_share:.1%} vs {best.loaded_share:.1%}",
                f"{ours.largest_share:.2f} vs {best.largest_share:.2f}",
                f"{ours.goodput_rps:.3f} vs {best.goodput_rps:.3f}",
                f"{ours.tpot_mean_ms:.1f} vs {best.tpot_mean_ms:.1f}",
                f"{ours.predicted_error:.0%} vs {best.predicted_error:.0%}",
            )
        )
    return (
        f"<h3>Where ours loses, and what differs there</h3><p>Cells in which ours is behind by more than {_TIE:.0%}. "
        "Fewer hits mean work done twice; more load on one node means queues; a large prediction error means that "
        "prices were wrong.</p>" + _table(header, rows)
    )


def _goodput(sweep: Sweep, runs: Sequence[Run], styles: dict[str, Style]) -> str:
    curve = len(sweep.rates) > 1
    figures = []
    for bandwidth in sweep.bandwidths_bytes_per_s:
        here = [run for run in runs if _at(run, bandwidth)]
        chart = _goodput_curve(sweep, here, styles) if curve else _goodput_bars(here)
        figures.append(_figure(f"{bandwidth / 1e9:g} GB/s", chart))
    hint = "" if curve else " Only one rate was run; several (--rate 1,2,4) show where each policy bends."
    return (
        f"<h2>Goodput against request rate</h2><p>Requests per second that met both limits.{hint}</p>{_grid(figures)}"
    )


def _goodput_curve(sweep: Sweep, runs: Sequence[Run], styles: dict[str, Style]) -> str:
    lines = []
    for name in sweep.policies:
        points = sorted((run.offered_rps, run.report.goodput_rps) for run in runs if run.report.policy == name)
        lines.append(Line(name, tuple(points), styles[name]))
    most = max((y for line in lines for _, y in line.points), default=1.0)
    return line_chart(
        "Goodput against request rate",
        Axis("arriving requests per second (1/s)", 0.0, 1.08 * max(run.offered_rps for run in runs)),
        Axis("goodput (good requests/s)", 0.0, max(1e-3, 1.08 * most)),
        lines,
        markers=True,
    )


def _goodput_bars(runs: Sequence[Run]) -> str:
    rows = [(run.report.policy, (run.report.goodput_rps,)) for run in runs]
    axis = Axis("goodput (good requests/s)", 0.0, max(1e-3, *(run.offered_rps for run in runs)))
    part = (f"of {number(runs[0].offered_rps)} arriving requests/s", "#0b4f9e")
    return stacked_bars("Goodput by policy", rows, (part,), axis, lambda values: number(values[0]))


def _at(run: Run, bandwidth_bytes_per_s: float) -> bool:
    return run.report.bandwidth_gbytes_per_s == bandwidth_bytes_per_s / 1e9


def _against_bandwidth(sweep: Sweep, runs: Sequence[Run], styles: dict[str, Style]) -> str:
    if len(sweep.bandwidths_bytes_per_s) < 2:
        return ""
    figures = []
    low, high = min(sweep.bandwidths_bytes_per_s) / 1e9, max(sweep.bandwidths_bytes_per_s) / 1e9
    for rate in sweep.rates:
        lines = []
        for name in sweep.policies:
            mine = [run.report for run in runs if run.report.policy == name and run.report.rate == rate]
            points = sorted((report.bandwidth_gbytes_per_s, report.ttft_mean_ms / 1e3) for report in mine)
            lines.append(Line(name, tuple(points), styles[name]))
        values = [y for line in lines for _, y in line.points if y > 0.0] or [1.0]
        top = min(max(values) * 1.15, min(values) * _MAX_SPAN)
        chart = line_chart(
            f"Mean TTFT against bandwidth at rate ×{rate:g}",
            Axis("bandwidth of a node's link, each way (GB/s, log scale)", low / 1.1, high * 1.1, log=True),
            Axis("mean TTFT (s, log scale)", min(values) / 1.15, top, log=True),
            lines,
            markers=True,
        )
        figures.append(_figure(f"Rate ×{rate:g}: {number(sweep.offered_rps(rate))} requests/s", chart))
    return (
        f"<h2>Mean TTFT against bandwidth</h2><p>Beyond {_MAX_SPAN:g} times the least, lines run along the top.</p>"
        f"{_grid(figures)}"
    )


def _cell(sweep: Sweep, group: list[Run], styles: dict[str, Style]) -> str:
    first = group[0].report
    charts = (
        _figure("Time to first token, cumulative", _cdf(sweep, group, styles)),
        _figure("Load share: every dot is a node (beyond 6 it stands at the edge)", _load_shares(group, styles)),
        _figure("Hit rate: prompt tokens that were not computed", _hits(group)),
        _figure("Plan mix", _plans(group)),
    )
    head = f"{first.bandwidth_gbytes_per_s:g} GB/s, rate ×{first.rate:g} ({number(group[0].offered_rps)} requests/s)"
    return f'<section class="cell"><h2>Cell: {escape(head)}</h2>{_grid(charts)}</section>'


def _cdf(sweep: Sweep, group: list[Run], styles: dict[str, Style]) -> str:
    lines, lows, highs = [], [], []
    for run in group:
        ordered = sorted(run.report.ttft_ms)
        if not ordered:
            continue
        lows.append(ordered[len(ordered) // 100])
        highs.append(ordered[-1])
        lines.append(Line(run.report.policy, _cdf_points(ordered, run.report.requests), styles[run.report.policy]))
    low, high = max(1e-3, min(lows, default=1.0) / 1e3), max(highs, default=1e3) / 1e3
    limit = sweep.preset.ttft_slo_ns / 1e9
    return line_chart(
        "Cumulative distribution of the time to first token",
        Axis("time to first token (s, log scale)", low, max(high, 2 * low), log=True),
        Axis("share of all requests (%)", 0.0, 100.0),
        lines,
        rule=Rule(limit, f"limit {limit:g} s"),
    )


def _cdf_points(ordered: Sequence[float], requests: int) -> tuple[tuple[float, float], ...]:
    """Seconds against percent of all requests, those without an answer included."""
    count = len(ordered)
    places = sorted({min(count - 1, round(i * (count - 1) / _CDF_POINTS)) for i in range(_CDF_POINTS + 1)})
    return tuple((ordered[place] / 1e3, 100.0 * (place + 1) / max(1, requests)) for place in places)


def _load_shares(group: list[Run], styles: dict[str, Style]) -> str:
    rows = []
    for run in group:
        shares = run.node_shares()
        shown = shares if len(shares) <= _MANY_NODES else sorted(set(shares))  # equal dots hide each other anyway
        rows.append((run.report.policy, shown, styles[run.report.policy]))
    most = max((value for _, values, _ in rows for value in values), default=1.0)
    axis = Axis("requests of a node, in units of a fair share", 0.0, min(_MAX_SHARE, max(2.0, 1.02 * most)))
    return strip_chart("Load share over nodes", rows, axis, Rule(1.0, "fair"))


def _hits(group: list[Run]) -> str:
    rows = [(run.report.policy, (100 * run.report.cached_share, 100 * run.report.loaded_share)) for run in group]
    most = max(sum(values) for _, values in rows)
    axis = Axis("share of prompt tokens (%)", 0.0, max(1.0, 1.02 * most))
    return stacked_bars("Hit rate by policy", rows, _HITS, axis, lambda values: f"{sum(values):.1f} %")


def _plans(group: list[Run]) -> str:
    rows = []
    for run in group:
        total = max(1, sum(run.report.plans.values()))
        rows.append((run.report.policy, [100 * run.report.plans.get(kind, 0) / total for kind, _ in _PLANS]))
    axis = Axis("share of answered requests (%)", 0.0, 100.0)
    return stacked_bars("Plan mix by policy", rows, _PLANS, axis, lambda values: f"{values[1] + values[2]:.1f} % loads")


def _numbers(runs: Sequence[Run]) -> str:
    header = (
        "policy",
        "GB/s",
        "rate",
        "requests/s",
        "TTFT mean (ms)",
        "p50 (ms)",
        "p90 (ms)",
        "p99 (ms)",
        "TPOT mean (ms)",
        "goodput (1/s)",
        "good",
        "hits",
        "GB moved",
        "failed loads",
        "busiest × fair",
        "GPU busy",
        "unanswered",
    )
    rows = []
    for run in runs:
        item = run.report
        rows.append(
            (
                item.policy, f"{item.bandwidth_gbytes_per_s:g}", f"×{item.rate:g}", f"{run.offered_rps:.2f}",
                f"{item.ttft_mean_ms:,.0f}", f"{item.ttft_p50_ms:,.0f}", f"{item.ttft_p90_ms:,.0f}",
                f"{item.ttft_p99_ms:,.0f}", f"{item.tpot_mean_ms:.1f}", f"{item.goodput_rps:.3f}",
                f"{item.good_share:.1%}", f"{item.hit_share:.1%}", f"{item.gbytes_moved:,.0f}",
                str(item.load_failures), f"{item.largest_share:.2f}", f"{item.gpu_busy_share:.0%}",
                str(item.unfinished),
            )
        )  # fmt: skip
    return f"<h2>All numbers</h2>{_table(header, rows)}"


def _reading() -> str:
    return (
        "<h2>How to read this</h2><p>All policies of a cell get the same requests, nodes, links and faults; they see "
        "the cluster as a router does: reports and the index lag. Nodes prefill in chunks beside continuous decode, "
        "keep KV in a finite cache with leaf-first LRU, and share the bandwidth of both ends of every link. Baselines "
        "follow the published rules of other routers with their defaults, on the same signals. Not modelled: host and "
        "disk tiers, tensor-parallel details, network topology beyond the nodes' links, tokenisation. "
        "See docs/simulator.md.</p>"
    )


def _row_class(name: str) -> str:
    return ' class="ours"' if name in (OURS, TUNED) else ""


def _figure(caption: str, chart: str) -> str:
    return f"<figure><figcaption>{escape(caption)}</figcaption>{chart}</figure>"


def _grid(figures: Sequence[str]) -> str:
    return f'<div class="grid">{"".join(figures)}</div>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f"<tr{_row_class(row[0])}>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
