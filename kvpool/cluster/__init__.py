"""Composition root: the one place that starts processes and actors and wires the packages together.

`launcher` starts a cluster and ends it, `processes` supervises metadata servers, `connection` is what clients use to
reach the actors, `state` remembers clusters started by ``kvpool up``, `supervisor` is the process behind it.
Only this package, `kvpool.cli` and the scripts may import both `router` and `workers`.
"""
