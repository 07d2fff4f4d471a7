"""Books of pins converge whatever the order, and assignments make exactly the copies that are missing."""

from __future__ import annotations

from random import Random

import pytest

from kvpool.errors import CapacityError, RequestError
from kvpool.metadata.membership import DirectoryLimits
from kvpool.metadata.pins import MAX_DUTIES, MAX_PINS, MAX_TRACES, Pin, PinBook, assign, refuse_full, view_of
from kvpool.metadata.pins_wire import (
    pin_to_wire,
    pins_from_wire,
    tending_from_wire,
    tending_to_wire,
    view_from_wire,
    view_to_wire,
)
from kvpool.metadata.state import DirectoryState
from kvpool.types import BlockHash, WorkerKey
from tests.contract.metadata_support import hashes, member


def _pin(number: int, stamp_ns: int, copies: int = 1, blocks: int = 3) -> Pin:
    chain = tuple(BlockHash(bytes([number % 256, number // 256, index]).ljust(16, b"\0")) for index in range(blocks))
    pin = Pin.of("", chain, copies, stamp_ns)
    return pin if copies else Pin(pin.pin_id, "", (), 0, stamp_ns)


@pytest.mark.parametrize("seed", range(30))
def test_books_that_saw_the_same_pins_in_any_order_and_any_number_of_times_are_equal(seed: int) -> None:
    rng = Random(seed)
    history = [_pin(rng.randrange(6), rng.randrange(20), rng.choice([0, 1, 1, 3])) for _ in range(40)]
    newest: dict[str, Pin] = {}
    for pin in history:
        known = newest.get(pin.pin_id)
        if known is None or (pin.stamp_ns, -pin.min_copies) > (known.stamp_ns, -known.min_copies):
            newest[pin.pin_id] = pin
    books = []
    for _ in range(3):
        book, shuffled = PinBook(), [*history, *rng.sample(history, 10)]
        rng.shuffle(shuffled)
        for pin in shuffled:
            book.merge([pin])
        books.append(book)
    books.append(PinBook())
    books[-1].merge(books[0].all())  # by way of another book
    for book in books:
        assert set(book.all()) == set(newest.values())
        assert book.digest == books[0].digest
        assert {pin for pin in newest.values() if pin.min_copies} == set(book.active())
    assert books[0].merge([_pin(200, 99)]) == (1, 0)
    assert books[0].digest != books[1].digest


def test_a_book_is_bounded_and_says_so() -> None:
    book = PinBook()
    assert book.merge(_pin(number, 1) for number in range(MAX_PINS + 2)) == (MAX_PINS, 2)
    with pytest.raises(CapacityError, match="unpin"):
        refuse_full(2)
    assert book.merge([_pin(0, 2, copies=0), _pin(MAX_PINS, 1)]) == (2, 0)  # one taken back makes room for another
    for number in range(MAX_TRACES + 50):
        book.merge([_pin(number, 3 + number, copies=0)])
    assert len(book.all()) <= MAX_PINS + MAX_TRACES


def test_malformed_pins_are_refused_by_name() -> None:
    good = _pin(1, 1)
    for bad in (
        Pin("short", "", good.chain, 1, 1),
        Pin(good.pin_id, "", (), 1, 1),
        Pin(good.pin_id, "", good.chain[:2], 1, 1),
        Pin(good.pin_id, "", good.chain, 0, 1),
        Pin(good.pin_id, "", good.chain, 10**6, 1),
    ):
        with pytest.raises(RequestError):
            PinBook().merge([bad])


def test_the_oldest_pins_are_kept_first_when_not_all_fit() -> None:
    book = PinBook()
    book.merge([_pin(2, 20), _pin(1, 10)])
    assert book.wanted(4) == [*_pin(1, 10).chain, _pin(2, 20).chain[0]]


@pytest.mark.parametrize("seed", range(30))
def test_assigned_copies_bring_every_pin_to_its_floor_and_not_beyond(seed: int) -> None:
    rng = Random(seed)
    members = [member(f"w{number}") for number in range(6)]
    pins = [_pin(number, number, rng.randrange(1, 5)) for number in range(rng.randrange(1, 6))]
    lengths: dict[str, dict[WorkerKey, int]] = {
        pin.pin_id: {info.key: rng.choice([0, 0, 1, 3]) for info in members} for pin in pins
    }
    for _ in range(12):  # each round carries the duties out
        before = assign(pins, members, lambda pin: lengths[pin.pin_id])
        assert before == assign(pins, list(reversed(members)), lambda pin: lengths[pin.pin_id])
        for key, duties in before.items():
            assert len(duties) <= MAX_DUTIES
            for duty in duties:
                assert all(lengths[duty.pin_id][holder.key] == holder.blocks for holder in duty.holders)
                assert lengths[duty.pin_id][key] < duty.holders[0].blocks
                lengths[duty.pin_id][key] = duty.holders[0].blocks
    assert assign(pins, members, lambda pin: lengths[pin.pin_id]) == {}
    for pin in pins:
        longest = max(lengths[pin.pin_id].values())
        copies = sum(blocks == longest for blocks in lengths[pin.pin_id].values())
        assert not longest or copies >= pin.min_copies


def test_who_drains_is_neither_asked_to_copy_nor_counted_as_a_copy() -> None:
    state = DirectoryState(7, DirectoryLimits(), 0)
    infos = [member(f"w{number}") for number in range(3)]
    chain = hashes(3)
    for info in infos:
        state.join(info, 0)
    state.index.stored(infos[0].key, 1, chain, linked=True)
    (view,) = state.merge_pins([Pin.of("", chain, 1, 5)])
    assert view == view_of(Pin.of("", chain, 1, 5), {infos[0].key: 3})
    assert all(not state.tend(info.key, (), 0, (), 1).duties for info in infos)
    state.drain(infos[0].key.worker_id)
    later_ns = 10**9
    assert not any(state.tend(info.key, (), 0, (), later_ns).duties for info in infos)  # hidden: nobody can read it
    assert state.merge_pins([])[0].holders == ()


def test_a_restarted_directory_learns_its_pins_from_the_workers_and_forgotten_ones_do_not_come_back() -> None:
    old, new = DirectoryState(1, DirectoryLimits(), 0), DirectoryState(2, DirectoryLimits(), 0)
    chain = hashes(2)
    for state in (old, new):
        state.join(member(), 0)
    old.merge_pins([Pin.of("", chain, 2, 5)])
    book = PinBook()
    answer = old.tend(member().key, chain, book.digest, (), 1)
    book.merge(answer.pins)
    assert answer.pins_digest == book.digest
    assert old.tend(member().key, (), book.digest, (), 1).pins == ()
    answer = new.tend(member().key, (), book.digest, (), 1)
    assert answer.pins_digest != book.digest
    answer = new.tend(member().key, (), book.digest, book.all(), 1)  # so the worker tells it
    assert answer.pins_digest == book.digest
    assert new.merge_pins([])[0].pin.min_copies == 2
    old.merge_pins([Pin(Pin.of("", chain, 1, 6).pin_id, "", (), 0, 6)])
    book.merge(old.tend(member().key, (), book.digest, (), 1).pins)
    assert new.tend(member().key, (), book.digest, book.all(), 1).pins_digest == book.digest
    assert new.merge_pins([]) == ()


def test_pins_and_answers_survive_the_wire() -> None:
    state = DirectoryState(7, DirectoryLimits(), 0)
    infos = [member(f"w{number}") for number in range(3)]
    chain = hashes(3)
    for info in infos:
        state.join(info, 0)
    state.index.stored(infos[0].key, 1, chain, linked=True)
    (view,) = state.merge_pins([Pin.of("tenant", chain, 3, 5)])
    assert view_from_wire(view_to_wire(view)) == view
    answer = state.tend(infos[1].key, [*chain, *hashes(1)], 0, (), 10**9)
    assert answer.others == (1, 1, 1, 0)
    assert answer.spare == (True, True, True, False)
    assert answer.duties
    assert tending_from_wire(tending_to_wire(answer)) == answer
    pins = (view.pin, Pin(view.pin.pin_id, "", (), 0, 9))
    assert pins_from_wire([pin_to_wire(pin) for pin in pins]) == pins
