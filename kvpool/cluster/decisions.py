"""Decision records of a cluster, wherever they are: each router keeps its own, and nobody else has them."""

from __future__ import annotations

import json
import logging
from typing import Any

from kvpool.cluster.connection import ClusterConnection
from kvpool.errors import KVPoolError, RequestError, UnavailableError
from kvpool.types import RequestId

EXPLAIN_TIMEOUT_S = 5.0
"""A router that stands still may not keep what the others know for longer."""

log = logging.getLogger(__name__)


async def explain(connection: ClusterConnection, request_id: RequestId) -> dict[str, Any]:
    """The record of the newest decision about a request that has an outcome, or else of the newest one, and all of
    them as text under ``text``. Several routers decided where the first was late or down at a retry.

    Raises:
        RequestError: no router keeps one; ``waiting_s`` in the details says that it waits for one.
        UnavailableError: a router does not answer, and no other one has it.
    """
    answers = await _answers(connection, "explain", request_id, timeout_s=EXPLAIN_TIMEOUT_S)
    found = [answer for answer in answers.values() if not isinstance(answer, KVPoolError)]
    if not found:
        raise _why_none(answers)
    found.sort(key=lambda record: record["at_unix_ns"])
    newest = next((record for record in reversed(found) if record["outcome"] is not None), found[-1])
    return {**newest, "text": "\n".join(record["text"] for record in found)}


async def all_records(connection: ClusterConnection) -> list[str]:
    """The records that every answering router keeps, oldest first, as JSON lines; a silent one is logged.

    Raises:
        UnavailableError: no router answers.
    """
    answers = await _answers(connection, "records")
    lists = []
    for name, answer in answers.items():
        if not isinstance(answer, KVPoolError):
            lists.append(answer)
        elif len(answers) > 1:
            log.warning("records of %s are missing: %s", name, answer)
    if not lists:
        raise _why_none(answers)
    if len(lists) == 1:
        return list(lists[0])
    return sorted((line for lines in lists for line in lines), key=lambda line: int(json.loads(line)["at_unix_ns"]))


async def _answers(connection: ClusterConnection, method: str, *args: Any, **options: Any) -> dict[str, Any]:
    """What every router says. When none says even which there are, that is an error which shows the way out."""
    try:
        return await connection.ask_routers(method, *args, **options)
    except UnavailableError as error:
        if error.details.get("gone"):
            raise
        raise UnavailableError(
            f"no router answers, and only they keep decisions ({error.message}); ask again, and if it stays so, "
            "'kvpool status' shows what is wrong"
        ) from error


def _why_none(answers: dict[str, Any]) -> KVPoolError:
    """The error to raise when no router has what was asked for."""
    errors: dict[str, KVPoolError] = answers
    for error in errors.values():
        if "waiting_s" in error.details:
            return error  # the others know nothing of it, which says less
    silent = [name for name, error in errors.items() if not isinstance(error, RequestError)]
    if not silent or len(errors) == 1:
        return next(iter(errors.values()))
    return UnavailableError(
        f"no router that answers has a record, and {', '.join(silent)} does not answer: {errors[silent[0]].message}; "
        "ask again",
        routers=len(errors),
    )
