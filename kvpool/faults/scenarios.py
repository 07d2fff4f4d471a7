"""The scenarios by name: what each breaks, with which mechanism, what it proves, and what it needs.

A new one is a coroutine over `Nemesis` and an entry in `SCENARIOS`.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum

from kvpool.errors import RequestError
from kvpool.faults.nemesis import Nemesis
from kvpool.metadata.disturbance import Disturbance
from kvpool.transport.shaping import LinkShape

LINK_FAULT_S = 6.0
FLOOD_REQUESTS = 24
FLOOD_TOKENS = 640
TINY_SEGMENT_BLOCKS = 128
CLOCK_JUMP_NS = 3_600_000_000_000


class Mechanism(Enum):
    """How a fault is made."""

    SIGNAL = "a real signal to a real process"
    SHAPING = "the shaping transport around UCX inside the workers: no packet is touched, reads are held back or spoilt"
    LINK = "links by network namespaces where the machine allows, by the shaping transport elsewhere"
    CLOCK = "an offset that every process of an embedded cluster adds where it reads the wall clock"
    FILES = "the workers' own files, changed in place, and the kernel's limit on the size of files"
    PUBLISHER = "a switch in the worker's publisher: batches of events are left out, sent twice or held back"
    LOAD = "ordinary requests"
    API = "the cluster's own interface"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a scenario needs of its cluster.

    Attributes:
        metadata_replicas: at least.
        num_blocks: size of every segment; None leaves it.
        shaped: workers with the shaping transport.
        links: workers whose links can be cut: by network namespaces where the machine allows, or else by shaping.
        embedded: a cluster that this process owns.
        ray_nodes: at least, all on this machine; more than one needs an embedded cluster.
        disk: workers with a disk tier, in a directory that is removed afterwards.
    """

    metadata_replicas: int = 1
    num_blocks: int | None = None
    shaped: bool = False
    embedded: bool = False
    ray_nodes: int = 1
    disk: bool = False
    links: bool = False

    def __or__(self, other: Needs) -> Needs:
        """Both at once."""
        sizes = [size for size in (self.num_blocks, other.num_blocks) if size is not None]
        return Needs(
            max(self.metadata_replicas, other.metadata_replicas),
            min(sizes, default=None),
            self.shaped or other.shaped,
            self.embedded or other.embedded,
            max(self.ray_nodes, other.ray_nodes),
            self.disk or other.disk,
            self.links or other.links,
        )


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to break a cluster: ``strike`` does it once and returns when it is healed."""

    name: str
    breaks: str
    proves: str
    mechanism: Mechanism
    strike: Callable[[Nemesis, str], Awaitable[None]]
    needs: Needs = Needs()


async def _kill_holder(nemesis: Nemesis, name: str) -> None:
    holder, _ = await nemesis.pair()
    await nemesis.kill_actor(name, holder)


async def _kill_reader(nemesis: Nemesis, name: str) -> None:
    _, reader = await nemesis.pair()
    await nemesis.kill_actor(name, reader)


async def _pause_holder(nemesis: Nemesis, name: str) -> None:
    holder, _ = await nemesis.pair()
    await nemesis.pause_actor(name, holder)


async def _kill_router(nemesis: Nemesis, name: str) -> None:
    await nemesis.kill_actor(name, await nemesis.a_router())


async def _pause_router(nemesis: Nemesis, name: str) -> None:
    await nemesis.pause_actor(name, await nemesis.a_router())


async def _kill_metadata(nemesis: Nemesis, name: str) -> None:
    await nemesis.kill_metadata(name, nemesis.arena.rng.randrange(len(nemesis.arena.metadata)))


async def _pause_metadata(nemesis: Nemesis, name: str) -> None:
    await nemesis.pause_metadata(name, nemesis.arena.rng.randrange(len(nemesis.arena.metadata)))


async def _rolling_restart(nemesis: Nemesis, name: str) -> None:
    for worker in nemesis.workers():
        await nemesis.kill_actor(name, worker)


async def _drain(nemesis: Nemesis, name: str) -> None:
    holder, _ = await nemesis.pair()
    await nemesis.drain_worker(name, holder)


async def _evict_storm(nemesis: Nemesis, name: str) -> None:
    await nemesis.flood(name, FLOOD_REQUESTS, FLOOD_TOKENS)


async def _join_storm(nemesis: Nemesis, name: str) -> None:
    await nemesis.join_workers(name, 2)


def _slow(factor: float) -> Callable[[Nemesis, str], Awaitable[None]]:
    async def strike(nemesis: Nemesis, name: str) -> None:
        holder, _ = await nemesis.pair()
        await nemesis.slow_links(name, holder, factor, LINK_FAULT_S)

    return strike


async def _one_way(nemesis: Nemesis, name: str) -> None:
    holder, reader = await nemesis.pair()
    await nemesis.mute_link(name, reader, holder, LINK_FAULT_S)


async def _drop(nemesis: Nemesis, name: str) -> None:
    holder, _ = await nemesis.pair()
    await nemesis.drop_links(name, holder, LINK_FAULT_S)


async def _corrupt(nemesis: Nemesis, name: str) -> None:
    holder, _ = await nemesis.pair()
    await nemesis.shape_answers(name, holder, LinkShape(corruption=1.0), LINK_FAULT_S)


def _shaped(shape: LinkShape) -> Callable[[Nemesis, str], Awaitable[None]]:
    async def strike(nemesis: Nemesis, name: str) -> None:
        holder, _ = await nemesis.pair()
        await nemesis.shape_links(name, holder, shape, LINK_FAULT_S)

    return strike


async def _clock_jump(nemesis: Nemesis, name: str) -> None:
    """Restarts are where a wall clock is read: numbers of incarnations come from it."""
    holder, _ = await nemesis.pair()
    async with nemesis.wall_clock(name, CLOCK_JUMP_NS):
        await nemesis.kill_actor(name, holder)
    async with nemesis.wall_clock(name, -CLOCK_JUMP_NS):
        await nemesis.kill_actor(name, holder)  # its predecessor has a number two jumps ahead
        await nemesis.kill_metadata(name, 0)


async def _kill_node(nemesis: Nemesis, name: str) -> None:
    await nemesis.kill_node(name)


async def _damage_disks(nemesis: Nemesis, name: str) -> None:
    await asyncio.gather(
        nemesis.damage_disks(name, LINK_FAULT_S), nemesis.flood(name, FLOOD_REQUESTS // 2, FLOOD_TOKENS)
    )


async def _fill_disks(nemesis: Nemesis, name: str) -> None:
    await asyncio.gather(nemesis.fill_disks(name, LINK_FAULT_S), nemesis.flood(name, FLOOD_REQUESTS // 2, FLOOD_TOKENS))


def _disturbed(disturbance: Disturbance) -> Callable[[Nemesis, str], Awaitable[None]]:
    """A holder's events go wrong while a flood makes it evict what the index promises."""

    async def strike(nemesis: Nemesis, name: str) -> None:
        holder, _ = await nemesis.pair()
        await asyncio.gather(
            nemesis.disturb_events(name, holder, disturbance, LINK_FAULT_S),
            nemesis.flood(name, FLOOD_REQUESTS // 2, FLOOD_TOKENS),
        )

    return strike


_SIGNAL, _SHAPING = Mechanism.SIGNAL, Mechanism.SHAPING
_TWO_REPLICAS, _SHAPED, _LINKS = Needs(metadata_replicas=2), Needs(shaped=True), Needs(shaped=True, links=True)
_DISK = Needs(num_blocks=TINY_SEGMENT_BLOCKS, embedded=True, disk=True)
_STALE = Needs(num_blocks=TINY_SEGMENT_BLOCKS, shaped=True)

_ALL = (
    Scenario(
        "kill-holder",
        "SIGKILL to the holder of a load that was just decided",
        "a load from a dead peer is redone, its other requests move on without losing or repeating a token",
        _SIGNAL,
        _kill_holder,
    ),
    Scenario(
        "kill-reader",
        "SIGKILL to the reader of a load that was just decided",
        "requests move to another worker; the holder's pages come free",
        _SIGNAL,
        _kill_reader,
    ),
    Scenario(
        "pause-holder",
        "SIGSTOP to a holder for longer than its lease",
        "a silent holder costs a stall bound, is taken off, and its zombie is fenced when it wakes up",
        _SIGNAL,
        _pause_holder,
    ),
    Scenario(
        "kill-router",
        "SIGKILL to a router",
        "running streams do not pass through it; new requests ask another one, or wait inside their deadline",
        _SIGNAL,
        _kill_router,
    ),
    Scenario(
        "pause-router",
        "SIGSTOP to a router for longer than a lease",
        "the same, without a closed connection to tell",
        _SIGNAL,
        _pause_router,
    ),
    Scenario(
        "kill-metadata",
        "SIGKILL to a metadata server",
        "routers go on with what they know; owners register again by themselves",
        _SIGNAL,
        _kill_metadata,
    ),
    Scenario(
        "kill-one-replica",
        "SIGKILL to one of two metadata servers",
        "readers fail over to the other",
        _SIGNAL,
        _kill_metadata,
        _TWO_REPLICAS,
    ),
    Scenario(
        "pause-metadata",
        "SIGSTOP to a metadata server for longer than a lease",
        "a silent directory is not taken for a cluster without members",
        _SIGNAL,
        _pause_metadata,
    ),
    Scenario(
        "rolling-restart",
        "SIGKILL to every worker in turn, each after the one before serves again",
        "a whole fleet is replaced under load",
        _SIGNAL,
        _rolling_restart,
    ),
    Scenario(
        "kill-node",
        "SIGKILL to one of two Ray nodes: its raylet and every worker on it",
        "what ran there moves on within its lease; Ray starts it again elsewhere",
        _SIGNAL,
        _kill_node,
        Needs(embedded=True, ray_nodes=2),
    ),
    Scenario(
        "drain-under-load",
        "drain a holder through the metadata service, end it when it is idle",
        "a drained worker finishes what it has and gets nothing new",
        Mechanism.API,
        _drain,
    ),
    Scenario(
        "evict-storm",
        f"{FLOOD_REQUESTS} unique long prompts at once into segments of {TINY_SEGMENT_BLOCKS} blocks",
        "eviction under pressure withdraws what it takes and spoils no read",
        Mechanism.LOAD,
        _evict_storm,
        Needs(num_blocks=TINY_SEGMENT_BLOCKS),
    ),
    Scenario(
        "clock-jump",
        "every wall clock jumps an hour ahead, then back by two; a holder is killed after each, then the directory",
        "only monotonic time matters; a successor whose clock was set back still takes the higher number",
        Mechanism.CLOCK,
        _clock_jump,
        Needs(embedded=True),
    ),
    Scenario(
        "index-lost-events",
        "half of a holder's block events are lost while a flood evicts its blocks",
        "a gap is seen, a snapshot makes it good, and no load believes what is not there",
        Mechanism.PUBLISHER,
        _disturbed(Disturbance(loss=0.5)),
        _STALE,
    ),
    Scenario(
        "index-late-events",
        "a holder's block events come three seconds late while a flood evicts its blocks",
        "a load of what is gone is told so by the holder and redone",
        Mechanism.PUBLISHER,
        _disturbed(Disturbance(delay_s=3.0)),
        _STALE,
    ),
    Scenario(
        "index-repeated-events",
        "every one of a holder's block events comes twice while a flood evicts its blocks",
        "what is repeated changes nothing",
        Mechanism.PUBLISHER,
        _disturbed(Disturbance(repetition=1.0)),
        _STALE,
    ),
    Scenario(
        "disk-corrupt",
        "block files of every worker are flipped, cut, emptied, swapped or removed while a flood evicts to disk",
        "a file is believed only after its checksum and identity were compared",
        Mechanism.FILES,
        _damage_disks,
        _DISK,
    ),
    Scenario(
        "disk-full",
        "no worker can write a block file while a flood evicts to disk",
        "what cannot be written is a miss, and nobody waits for a disk",
        Mechanism.FILES,
        _fill_disks,
        _DISK,
    ),
    Scenario(
        "node-join-storm",
        "two new workers join at once",
        "growth disturbs nobody",
        Mechanism.API,
        _join_storm,
        Needs(embedded=True),
    ),
    Scenario(
        "link-slow-10x",
        "links from a holder at a tenth of the rate the router has learned",
        "late loads give way to computing",
        Mechanism.LINK,
        _slow(10),
        _LINKS,
    ),
    Scenario(
        "link-slow-100x",
        "the same at a hundredth",
        "a load that cannot end in time costs no more than its deadline",
        Mechanism.LINK,
        _slow(100),
        _LINKS,
    ),
    Scenario(
        "link-drop",
        "reads from a holder are never answered",
        "silence ends at the stall bound",
        Mechanism.LINK,
        _drop,
        _LINKS,
    ),
    Scenario(
        "link-one-way",
        "one reader gets nothing from one holder",
        "a partial partition costs that pair its loads and nobody a request",
        Mechanism.LINK,
        _one_way,
        _LINKS,
    ),
    Scenario(
        "link-stall",
        "links from a holder stand still",
        "silence ends at the stall bound",
        _SHAPING,
        _shaped(LinkShape(stalled=True)),
        _SHAPED,
    ),
    Scenario(
        "payload-truncate",
        "four of five pieces of every read from a holder are cut short",
        "what arrived is used, what is missing is redone at the stall bound",
        _SHAPING,
        _shaped(LinkShape(truncation=0.8)),
        _SHAPED,
    ),
    Scenario(
        "payload-duplicate",
        "every piece of a read from a holder comes twice",
        "the second copy changes nothing and falls into no page that has another use by then",
        _SHAPING,
        _shaped(LinkShape(duplication=1.0)),
        _SHAPED,
    ),
    Scenario(
        "payload-reorder",
        "pieces of two blocks come in any order, some of them twice",
        "blocks count by what they are, not by when they come",
        _SHAPING,
        _shaped(LinkShape(reordering=True, duplication=0.3, delay_ns=2_000_000)),
        _SHAPED,
    ),
    Scenario(
        "link-corrupt",
        "every block that a holder offers has a wrong checksum",
        "no such block is used",
        _SHAPING,
        _corrupt,
        _SHAPED,
    ),
)

SCENARIOS = {scenario.name: scenario for scenario in _ALL}


def find_scenario(name: str) -> Scenario:
    """A scenario by name.

    Raises:
        RequestError: there is none; the message names the nearest.
    """
    found = SCENARIOS.get(name)
    if found is None:
        near = difflib.get_close_matches(name, SCENARIOS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise RequestError(f"no scenario {name!r}{hint} 'kvpool inject list' names them all", field="scenario")
    return found
