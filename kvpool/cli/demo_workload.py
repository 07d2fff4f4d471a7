"""The demo's workload: customers who ask about two product handbooks, all at once.  (pure)

Every chat opens with the same system prompt and one of two handbooks (together about 1,500 tokens), then pastes an
e-mail and asks about it, twice. The texts are made up here, always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM = (
    "You are the support assistant of Lindholm Instruments. Answer from the handbook below and from nothing else. "
    "Be brief and friendly, name the section you used, and say so when the handbook has no answer. "
    "Never promise a refund, a delivery date or a repair that the handbook does not mention."
)

_PRODUCTS = {
    "Fjord 200 weather station": (
        "sensor mast",
        "solar panel",
        "rain gauge",
        "radio bridge",
        "wind vane",
        "data logger",
    ),
    "Skerry 7 depth sounder": (
        "transducer",
        "display unit",
        "power lead",
        "keel bracket",
        "memory card",
        "alarm relay",
    ),
}
_TOPICS = (
    "installing the {part}",
    "cleaning the {part}",
    "replacing the {part}",
    "calibrating the {part}",
)
_SENTENCES = (
    "Before {topic}, switch the {product} off and wait {n} minutes so that the capacitors can discharge.",
    "Use only the {m} mm key from the tool bag, because a larger one damages the thread of the housing.",
    "If the status lamp blinks {k} times afterwards, hold the reset button for {n} seconds and begin again.",
    "Section {s} of the warranty covers a failed part for {m} months, provided that its seal is unbroken.",
)


@dataclass(frozen=True, slots=True)
class Chat:
    """One customer's chat.

    Attributes:
        name: label in the report.
        system: system prompt with the handbook.
        questions: what the customer sends, turn by turn.
    """

    name: str
    system: str
    questions: tuple[str, ...]


def handbook(product: str) -> str:
    """The handbook of a product, about 1,400 tokens."""
    lines = [f"HANDBOOK OF THE {product.upper()}"]
    section = 0
    for topic in _TOPICS:
        for part in _PRODUCTS[product][:3]:
            section += 1
            title = topic.format(part=part)
            lines.append(f"\n{section}. {title.capitalize()}")
            for index, sentence in enumerate(_SENTENCES):
                seed = section * 7 + index * 3
                lines.append(
                    sentence.format(
                        topic=title, product=product, n=seed % 9 + 2, m=seed % 11 + 4, k=seed % 4 + 2, s=section
                    )
                )
    return " ".join(lines)


def _email(customer: str, product: str, part: str, days: int) -> str:
    return (
        f"Hello, my name is {customer} and I bought the {product} {days} days ago from your shop at the harbour. "
        f"Since yesterday the {part} makes a clicking sound when the temperature falls below {days % 9 + 1} degrees, "
        f"and the readings jump by {days % 13 + 2} percent. I have already taken it apart once, put everything back as "
        f"it was and tightened all {days % 5 + 3} screws by hand, but the sound came back after {days % 7 + 2} hours. "
        f"My neighbour has the same model and never had this, so I think that mine is faulty. I will be away from "
        f"Thursday on and would like to know what I can do myself before that, which tool I need for it, and whether "
        f"anything I do would end the warranty. Kind regards, {customer}."
    )


def chats(per_handbook: int) -> tuple[Chat, ...]:
    """``per_handbook`` chats about each handbook, two turns each."""
    customers = ("Astrid", "Bjarne", "Camilla", "Didrik", "Elin", "Folke", "Greta", "Henrik")
    made = []
    for number in range(per_handbook):
        for index, product in enumerate(_PRODUCTS):
            customer = customers[(number * 2 + index) % len(customers)]
            part = _PRODUCTS[product][number % 3]
            made.append(
                Chat(
                    name=f"{customer}/{product.split()[0]}",
                    system=f"{SYSTEM}\n\n{handbook(product)}",
                    questions=(
                        _email(customer, product, part, 11 + 5 * number + index),
                        f"Thank you. And how long do I have to wait after switching it off before I touch the {part}?",
                    ),
                )
            )
    return tuple(made)
