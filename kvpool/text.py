"""Generated tokens → text as it streams: never half a character, never past a stop string.  (pure)"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "�"


class TextStream:
    """Turns growing token lists into text pieces that never have to be taken back.

    Args:
        decode: token ids → text.
        stop: strings that end the output; the text ends before the first of them.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._sent = 0
        self.text = ""
        self.stopped = False

    def push(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Add tokens; returns the text that is now certain, possibly empty. ``last`` releases what was held back."""
        if self.stopped:
            return ""
        self._tokens.extend(tokens)
        whole = self._decode(self._tokens)
        cuts = [whole.find(text) for text in self._stop if text in whole]
        if cuts:
            self.stopped = True
            whole = whole[: min(cuts)]
        elif not last:
            whole = whole[: len(whole) - self._held_back(whole)]
        piece = whole[self._sent :]
        self._sent = max(self._sent, len(whole))
        self.text = whole if len(whole) >= len(self.text) else self.text
        return piece

    def _held_back(self, whole: str) -> int:
        """Characters at the end that may still change: half a character, or the beginning of a stop string."""
        held = len(whole) - len(whole.rstrip(REPLACEMENT))
        for text in self._stop:
            for size in range(min(len(text) - 1, len(whole)), held, -1):
                if whole.endswith(text[:size]):
                    held = size
                    break
        return held
