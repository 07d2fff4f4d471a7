"""Fault runs: four parts that never merge, with a JSONL history between them.

    workload ─▶┐                                 shared-prefix chats at a set rate      (workload.py)
    nemesis  ─▶├─▶ history ─▶ checker ─▶ report  real signals to real processes         (nemesis.py, scenarios.py)
    probe    ─▶┘   JSONL      pure, offline      what router and workers say of it      (probe.py)

The checker knows nothing but the history, so a run can be judged again later, elsewhere and by stricter rules.
"""
