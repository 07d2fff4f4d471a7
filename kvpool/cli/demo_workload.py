"""The demo's workload: customers who ask about one product handbook, all at once.  (pure)

Every chat opens with the same system prompt and handbook (together about 1,400 tokens), pastes an e-mail, asks about
it, and asks again; the first one asks with a long correspondence, so that the worker that holds the handbook is busy.
The texts are made up here, always the same.
"""

from __future__ import annotations

from dataclasses import dataclass

SYSTEM = (
    "You are the support assistant of Lindholm Instruments. Answer from the handbook below and from nothing else. "
    "Be brief and friendly, name the section you used, and say so when the handbook has no answer. "
    "Never promise a refund, a delivery date or a repair that the handbook does not mention."
)

PRODUCT = "Fjord 200 weather station"
_PARTS = ("sensor mast", "solar panel", "rain gauge")
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


def handbook() -> str:
    """The handbook, about 1,300 tokens."""
    lines = [f"HANDBOOK OF THE {PRODUCT.upper()}"]
    section = 0
    for topic in _TOPICS:
        for part in _PARTS:
            section += 1
            title = topic.format(part=part)
            lines.append(f"\n{section}. {title.capitalize()}")
            for index, sentence in enumerate(_SENTENCES):
                seed = section * 7 + index * 3
                lines.append(
                    sentence.format(
                        topic=title, product=PRODUCT, n=seed % 9 + 2, m=seed % 11 + 4, k=seed % 4 + 2, s=section
                    )
                )
    return " ".join(lines)


def _email(customer: str, part: str, days: int) -> str:
    return (
        f"Hello, my name is {customer} and I bought the {PRODUCT} {days} days ago from your shop at the harbour. "
        f"Since yesterday the {part} makes a clicking sound when the temperature falls below {days % 9 + 1} degrees, "
        f"and the readings jump by {days % 13 + 2} percent. I have already taken it apart once, put everything back as "
        f"it was and tightened all {days % 5 + 3} screws by hand, but the sound came back after {days % 7 + 2} hours. "
        f"My neighbour has the same model and never had this, so I think that mine is faulty. I will be away from "
        f"Thursday on and would like to know what I can do myself before that, which tool I need for it, and whether "
        f"anything I do would end the warranty. Kind regards, {customer}."
    )


CUSTOMERS = ("Astrid", "Bjarne", "Camilla", "Didrik", "Elin", "Folke", "Greta", "Henrik")
FRIENDS = ("Inga", "Jonas", "Karin", "Lars", "Maja", "Nils")


def make_chats(count: int) -> tuple[Chat, ...]:
    """``count`` chats about the handbook, two turns each; at most as many as there are customers.

    In the second turn of the first chat the customer forwards a long correspondence, about 900 tokens. It keeps the
    worker that holds the handbook busy while the others come.
    """
    system = f"{SYSTEM}\n\n{handbook()}"
    chats = []
    for number, customer in enumerate(CUSTOMERS[:count]):
        part = _PARTS[number % len(_PARTS)]
        follow_up = f"Thank you. And how long do I have to wait after switching it off before I touch the {part}?"
        if number == 0:
            letters = [_email(name, _PARTS[index % len(_PARTS)], 40 + 3 * index) for index, name in enumerate(FRIENDS)]
            follow_up = " ".join(["My friends wrote to me about theirs. Is it the same fault?", *letters])
        chats.append(Chat(name=customer, system=system, questions=(_email(customer, part, 11 + 5 * number), follow_up)))
    return tuple(chats)
