"""Benchmarks: each module has ``run(*, quick, peers) -> list[Row]``; `kvpool.bench.report` prints them all alike."""
