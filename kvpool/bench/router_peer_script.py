"""Dynamo's selection service, for `kvpool.bench.router`; runs in a Python that has ``ai-dynamo``, without kvpool.

``python router_peer_script.py WORKERS DECISIONS`` prints ``{"select_and_reserve_us": median}`` for prompts of 1,600
tokens. Its index stays empty, since it only fills over ZMQ: that favours it, there is no prefix to follow.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time

PROMPT_TOKENS = 1600
BLOCK_TOKENS = 16
VOCABULARY = 30_000


async def measure(workers: int, decisions: int) -> float:
    """Median microseconds of one `select_and_reserve`."""
    from dynamo.llm import SelectionService

    service = SelectionService(indexer_threads=1)
    for number in range(workers):
        await service.upsert_worker(
            {
                "worker_id": number,
                "model_name": "m",
                "block_size": BLOCK_TOKENS,
                "endpoint": f"http://127.0.0.1:{20_000 + number}",
                "kv_events_endpoint": "tcp://127.0.0.1:29999",
                "total_kv_blocks": 100_000,
                "max_num_batched_tokens": 8192,
            }
        )
    rng, taken = random.Random(0), []
    for number in range(decisions):
        tokens = [rng.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS)]
        request = {"model_name": "m", "token_ids": tokens, "selection_id": f"s{number}"}
        start = time.perf_counter_ns()
        await service.select_and_reserve(request)
        taken.append(time.perf_counter_ns() - start)
        await service.free_reservation(f"s{number}")
    service.shutdown()
    return statistics.median(taken) / 1e3


if __name__ == "__main__":
    print(json.dumps({"select_and_reserve_us": asyncio.run(measure(int(sys.argv[1]), int(sys.argv[2])))}))
