"""The wire format: round trips, refusal of everything malformed, and how blocks merge into runs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.errors import IntegrityError
from kvpool.transport.wire import (
    MAX_ADDRESS,
    MAX_PID,
    Bye,
    Grant,
    Message,
    Offer,
    Pull,
    Refuse,
    Run,
    Stop,
    Window,
    data_tag,
    decode,
    encode,
    is_data_tag,
    merge_runs,
    runs_of_offer,
)
from kvpool.types import BlockHash, WorkerEpoch, WorkerId, WorkerKey

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
ADDRESS = st.integers(0, MAX_ADDRESS)
KEYS = st.builds(WorkerKey, st.text(max_size=20).map(WorkerId), st.integers(0, 2**63).map(WorkerEpoch))
HASHES = st.binary(min_size=16, max_size=16).map(BlockHash)


@st.composite
def pulls(draw: st.DrawFn) -> Pull:
    hashes = tuple(draw(st.lists(HASHES, max_size=20)))
    offsets = tuple(draw(st.lists(U64, min_size=len(hashes), max_size=len(hashes))))
    fixed = [draw(U64) for _ in range(3)]
    ids = draw(KEYS), draw(st.binary(max_size=300)), draw(KEYS)
    codecs = tuple(draw(st.lists(st.integers(1, 255), max_size=4)))
    return Pull(fixed[0], fixed[1], fixed[2], *ids, hashes, offsets, draw(U64), codecs)


@st.composite
def offers(draw: st.DrawFn) -> Offer:
    checksums = tuple(draw(st.lists(st.none() | U64, max_size=20)))
    runs = tuple(draw(st.lists(U32, max_size=8)))
    window = None
    if draw(st.booleans()):
        addresses = tuple(draw(st.lists(ADDRESS, min_size=len(runs), max_size=len(runs))))
        window = Window(draw(st.integers(1, MAX_PID)), draw(ADDRESS), draw(U64), addresses)
    return Offer(draw(U64), draw(U64), checksums, runs, window, draw(st.integers(0, 255)))


MESSAGES = st.one_of(
    pulls(),
    offers(),
    st.builds(Refuse, U64, st.text(max_size=30), st.text(max_size=100)),
    st.builds(Grant, U64, U64, U32),
    st.builds(Stop, U64, U64, U32),
    st.builds(Bye, U64, U64),
)


@given(MESSAGES)
def test_every_message_survives_the_wire(message: Message) -> None:
    assert decode(encode(message)) == message


@settings(max_examples=300)
@given(MESSAGES, st.data())
def test_a_truncated_message_is_refused_and_names_its_pull_when_it_can(message: Message, data: st.DataObject) -> None:
    raw = encode(message)
    cut = data.draw(st.integers(0, len(raw) - 1))
    with pytest.raises(IntegrityError) as caught:
        decode(raw[:cut])
    if cut >= 12:
        assert caught.value.details["sequence"] == message.sequence


@given(st.binary(max_size=200))
def test_noise_is_refused_or_parses_but_never_crashes(raw: bytes) -> None:
    try:
        decode(raw)
    except IntegrityError:
        return


def test_another_version_is_refused() -> None:
    raw = bytearray(encode(Stop(1, 2)))
    raw[2] ^= 0xFF
    with pytest.raises(IntegrityError, match="version"):
        decode(raw)


def test_data_tags_are_told_apart_from_control_and_from_each_other() -> None:
    tags = {data_tag(sequence, run) for sequence in (0, 1, 2**38) for run in (0, 1, 2**24 - 1)}
    assert len(tags) == 9
    assert all(is_data_tag(tag) and tag < 2**64 for tag in tags)
    assert not is_data_tag(1)


def test_neighbours_on_both_sides_become_one_run() -> None:
    assert merge_runs([0, 10, 20, 50], [100, 110, 120, 130], 10, 1000) == (Run(0, 3), Run(3, 1))
    assert merge_runs([0, 10, 20], [100, 110, 200], 10, 1000) == (Run(0, 2), Run(2, 1))


def test_a_missing_block_ends_a_run() -> None:
    assert merge_runs([0, None, 20, 30], [100, 110, 120, 130], 10, 1000) == (Run(0, 1), Run(2, 2))
    assert merge_runs([None, None], [0, 10], 10, 1000) == ()


def test_a_run_is_no_longer_than_the_cap_but_at_least_one_block() -> None:
    assert merge_runs([0, 10, 20, 30, 40], [0, 10, 20, 30, 40], 10, 25) == (Run(0, 2), Run(2, 2), Run(4, 1))
    assert merge_runs([0, 10], [0, 10], 10, 1) == (Run(0, 1), Run(1, 1))


@given(st.lists(st.none() | st.integers(0, 6), max_size=30), st.integers(1, 60), st.randoms())
def test_reader_and_holder_agree_on_the_runs(slots: list[int | None], cap: int, rng: object) -> None:
    sources = [None if slot is None else slot * 10 for slot in slots]
    places = list(range(len(slots)))
    rng.shuffle(places)  # type: ignore[attr-defined]
    destinations = [place * 10 for place in places]
    runs = merge_runs(sources, destinations, 10, cap)
    covered = [index for run in runs for index in range(run.first, run.first + run.blocks)]
    assert covered == [index for index, source in enumerate(sources) if source is not None]
    offer = Offer(7, 0, tuple(sources), tuple(run.blocks for run in runs))
    assert runs_of_offer(offer, destinations, 10) == runs


@pytest.mark.parametrize("run_blocks", [(1,), (4,), (2, 2), (0, 3), (3, 1)])
def test_runs_that_do_not_fit_the_offer_are_refused(run_blocks: tuple[int, ...]) -> None:
    offer = Offer(7, 0, (1, None, 2, 3), run_blocks)
    with pytest.raises(IntegrityError):
        runs_of_offer(offer, [0, 10, 20, 30], 10)
