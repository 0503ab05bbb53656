"""A tokenizer of the `tokenizers` library word by word: what a word becomes is remembered and looked up.

Byte-level BPE tokenizers (GPT-2's, Llama 3's, Qwen's ...) first cut a text into words by one regular expression; what
becomes of a word does not depend on its neighbours. The library cuts and encodes each word anew, or nearly: it keeps
10,000. Here Python's own `re` cuts, a dict knows most words, and only new ones go to the library: several times as
many bytes a second, and the same ids.

Two engines have to agree on the expression. Character classes are therefore not taken from Python's Unicode tables:
the library's engine is asked for each class which characters it holds. What comes out is held against the library on
made-up texts that mix all kinds of characters; where anything differs, or anything in a tokenizer is not known here,
the library encodes whole texts as before.
"""

import json
import random
import re
from array import array
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, groupby, islice
from typing import Any

import numpy as np
import tokenizers
from tokenizers import Regex, pre_tokenizers

# What pre_tokenizers.ByteLevel(use_regex=True) cuts by: GPT-2's expression.
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Normalizers that leave ASCII as it is.
_HARMLESS_FOR_ASCII = {"NFC", "NFD", "NFKC", "NFKD"}
_MOST_ADDED_TOKENS = 64  # looked for in each text one by one
_MOST_WORDS, _MOST_CHARACTERS = 1 << 18, 1 << 23  # remembered at a time: some 60 MB
_LONG_TEXT = 1 << 20  # characters; longer ones go piece by piece
# Where more than half of a large batch is words not seen before (Chinese, say, whose "words" are clauses), looking
# them up costs more than it saves: the next batches go to the library whole, then it is tried again.
_NEW_SHARE, _LARGE_BATCH, _LEFT_OUT = 0.5, 1 << 16, 15
_PIECE = 1 << 16  # words of a long text at a time, words the library is given at a time
# An expression each for texts of ASCII, of Unicode's first plane, of its first two (where emoji are). The classes of
# all seventeen would take seconds to list.
_ASCII, _PLANE, _PLANES = 0x80, 0x10000, 0x20000
# Case-insensitively these equal ASCII letters; not all engines think so.
_FOLDED = "\u017f\u212a"

Ids = tuple[np.ndarray, np.ndarray]


class _Numbers(dict):
    """word -> its number, in the order of their first appearance; `new` are those without ids yet."""

    def __init__(self) -> None:
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        self.new.append(word)
        return number


class WordEncoder:
    """Encodes by looking words up. Make one with `word_encoder`.

    Args:
        core: what encodes new words, and texts that are not for us.
        pattern: the expression that `core` cuts by, in the library's syntax.
        ascii_only: `core` may change other characters before it cuts.
        foreign: texts that hold one of these are not for us.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, pattern: str, ascii_only: bool, foreign: Sequence[str]
    ) -> None:
        self._core, self._foreign = core, tuple(foreign)
        self._left_out = 0  # so many batches still go to the library whole
        self._case_folds = "(?i" in pattern
        self._pattern, self._ascii_only = pattern, ascii_only
        self._expressions: dict[int, re.Pattern[str] | None] = {}  # by limit, made when they are needed
        self._forget()

    @property
    def is_useful(self) -> bool:
        """Whether the engines agree at least on ASCII."""
        return self._expression(_ASCII) is not None

    def encode(self, texts: Sequence[str]) -> Ids:
        """Ids of all texts, one after the other, int32 [sum of lengths]; lengths, int64 [texts]."""
        parts: list[Ids] = []
        for is_long, run in groupby(texts, lambda text: len(text) > _LONG_TEXT):
            group = list(run)
            parts += map(self._encode_long, group) if is_long else [self._encode_short(group)]
        if not parts:
            return np.empty(0, np.int32), np.empty(0, np.int64)
        if len(parts) == 1:
            return parts[0]  # a copy of a long text's ids would be the most that is held at a time
        return np.concatenate([ids for ids, _ in parts]), np.concatenate([lengths for _, lengths in parts])

    def _encode_short(self, texts: Sequence[str]) -> Ids:
        if self._left_out:
            self._left_out -= 1
            return self._by_library(texts)
        self._forget_if_full()
        before, size = self._characters, sum(map(len, texts))
        words = [self._numbers_of(text) for text in texts]
        self._learn()
        if size >= _LARGE_BATCH and self._characters - before > _NEW_SHARE * size:
            self._left_out = _LEFT_OUT
        # What no alternative of the expression matches would be lost: the library cuts it out as a word of its own.
        lengths = np.frombuffer(self._lengths, np.int64)
        for place, (text, numbers) in enumerate(zip(texts, words)):
            if int(lengths[numbers].sum()) != len(text):
                words[place] = np.array([self._numbers[text]], np.int32)
        del lengths
        self._learn()
        counts = np.diff(np.frombuffer(self._ends, np.int64))
        totals = np.array([counts[numbers].sum() for numbers in words], np.int64)
        return self._ids_of(np.concatenate(words)), totals

    def _by_library(self, texts: Sequence[str]) -> Ids:
        encoded = [e.ids for e in self._core.encode_batch_fast(list(texts), add_special_tokens=False)]
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        return np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths

    def _encode_long(self, text: str) -> Ids:
        """Some ten thousand words at a time: neither the words nor what is known of them need fit in memory."""
        expression = self._expression_for(text)
        found = (match[0] for match in expression.finditer(text)) if expression is not None else iter(())
        ids, covered = array("i"), 0  # grows without a second copy of it
        while piece := list(islice(found, _PIECE)):
            self._forget_if_full()
            numbers = np.fromiter(map(self._numbers.__getitem__, piece), np.int32, len(piece))
            self._learn()
            ids.frombytes(self._ids_of(numbers).view(np.uint8))
            covered += sum(map(len, piece))
        if covered != len(text):
            return self._by_library([text])
        return np.frombuffer(ids, np.int32), np.array([len(ids)], np.int64)

    def _forget_if_full(self) -> None:
        if len(self._numbers) > _MOST_WORDS or self._characters > _MOST_CHARACTERS:
            self._forget()

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._ids = array("i")  # of all words, in the order of their numbers
        self._ends = array("q", [0])  # where each word's ids end
        self._lengths = array("q")  # in characters
        self._characters = 0

    def _numbers_of(self, text: str) -> np.ndarray:  # int32 [words]
        """A text as numbers of words; one that is not for us is one word."""
        expression = self._expression_for(text)
        if expression is None:
            return np.array([self._numbers[text]], np.int32)
        found = expression.findall(text)
        return np.fromiter(map(self._numbers.__getitem__, found), np.int32, len(found))

    def _expression_for(self, text: str) -> re.Pattern[str] | None:
        if any(part in text for part in self._foreign):
            return None
        if text.isascii():
            return self._expression(_ASCII)
        if self._ascii_only or (self._case_folds and any(character in text for character in _FOLDED)):
            return None
        if len(text.encode("utf-16-le")) == 2 * len(text):  # characters beyond the first plane take two units
            return self._expression(_PLANE)
        return self._expression(_PLANES) if ord(max(text)) < _PLANES else None

    def _expression(self, limit: int) -> re.Pattern[str] | None:
        if limit not in self._expressions:
            self._expressions[limit] = checked_expression(self._core, self._pattern, limit)
        return self._expressions[limit]

    def _learn(self) -> None:
        """Have the library encode the words that are new."""
        new, self._numbers.new = self._numbers.new, []
        for first in range(0, len(new), _PIECE):
            piece = new[first : first + _PIECE]
            encoded = [e.ids for e in self._core.encode_batch_fast(piece, add_special_tokens=False)]
            self._ids.extend(chain.from_iterable(encoded))
            counts = np.fromiter(map(len, encoded), np.int64, len(encoded))
            self._ends.frombytes((self._ends[-1] + np.cumsum(counts)).tobytes())
            self._lengths.extend(map(len, piece))
        self._characters += sum(map(len, new))

    def _ids_of(self, numbers: np.ndarray) -> np.ndarray:  # int32 [ids]
        """The ids of words, one after the other."""
        ids, ends = np.frombuffer(self._ids, np.int32), np.frombuffer(self._ends, np.int64)
        stops = ends[numbers + 1]
        taken = stops - ends[numbers]
        # Place i of the result reads behind its word's begin as far as it lies behind the word's first place.
        places = np.cumsum(taken)
        total = int(places[-1]) if len(places) else 0
        return ids[np.arange(total) + np.repeat(stops - places, taken)]


def word_encoder(core: tokenizers.Tokenizer) -> WordEncoder | None:
    """A WordEncoder for `core`, or None where it does more than cut by one expression and encode word by word."""
    described = json.loads(core.to_str())
    pattern = _pattern_of(described["pre_tokenizer"])
    normalizer = described["normalizer"]
    foreign = [token["content"] for token in described["added_tokens"] if not token["special"]]
    known_normalizer = normalizer is None or normalizer["type"] in _HARMLESS_FOR_ASCII
    if pattern is None or not known_normalizer or len(foreign) > _MOST_ADDED_TOKENS:
        return None
    if described["model"].get("dropout"):
        return None
    encoder = WordEncoder(core, pattern, normalizer is not None, foreign)
    return encoder if encoder.is_useful else None


def _pattern_of(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """The expression that a tokenizer cuts by, when it cuts by one and then works on bytes."""
    parts = [pre_tokenizer] if pre_tokenizer else []
    if parts and parts[0]["type"] == "Sequence":
        parts = parts[0]["pretokenizers"]
    kinds = [part["type"] for part in parts]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]) or parts[-1]["add_prefix_space"]:
        return None
    if kinds == ["ByteLevel"]:
        return GPT2_PATTERN if parts[0]["use_regex"] else None
    split = parts[0]
    plain = split["behavior"] == "Isolated" and not split["invert"] and not parts[1]["use_regex"]
    return split["pattern"].get("Regex") if plain else None


def checked_expression(core: tokenizers.Tokenizer, pattern: str, limit: int) -> re.Pattern[str] | None:
    """The expression for texts of characters below `limit`, None where it cuts a made-up text in another way."""
    expression = translate(pattern, limit)
    if expression is None:
        return None
    for text in _made_up_texts(limit, "(?i" in pattern):
        cut = core.pre_tokenizer.pre_tokenize_str(text)
        words = [text[begin:end] for _, (begin, end) in cut]
        if expression.findall(text) != words or any(expression.findall(word) != [word] for word in words):
            return None
    return expression


def translate(pattern: str, limit: int) -> re.Pattern[str] | None:
    """An expression of the library's engine (Oniguruma) for Python's `re`, for characters below `limit`.

    None where it holds anything but what is known to mean the same in both.
    """
    out, position, in_class = [], 0, False
    while position < len(pattern):
        token = _TOKEN.match(pattern, position)
        if token is None:
            return None
        text, position = token[0], token.end()
        if token["members"]:
            negated = text[1] in "PSDW"
            ranges = _members(_positive(text), limit)
            if in_class and negated:
                return None
            out.append(ranges if in_class else f"[{'^' if negated else ''}{ranges}]")
            continue
        if text in ("[", "[^") and in_class or text in ("&&", ".", "^", "$") and not in_class or text == "&&":
            return None  # classes within classes; anchors and the dot mean something else there
        in_class = text in ("[", "[^") or (in_class and text != "]")
        out.append(text)
    try:
        return re.compile("".join(out))
    except re.error:
        return None


_TOKEN = re.compile(
    r"(?P<members>\\[pP]\{\w+\}|\\[sSdDwW])"
    r"|\\[rnt]|\\x[0-9A-Fa-f]{2}|\\[^A-Za-z0-9]"
    r"|\(\?(?:i?:|!|=|<!|<=)|\[\^?|&&|\{\d*,?\d*\}(?!\+)|[^\\{]",
    re.DOTALL,
)


def _positive(members: str) -> str:
    return members[0] + members[1].lower() + members[2:]


@cache
def _members(members: str, limit: int) -> str:
    """The characters of a class such as \\p{L} as ranges for a class of `re`, by the library's own engine."""
    points = [*range(min(limit, 0xD800)), *range(0xE000, limit)]
    finder = pre_tokenizers.Split(Regex(members + "+"), "removed", invert=True)
    ranges = []
    for _, (begin, end) in finder.pre_tokenize_str("".join(map(chr, points))):
        first, last = points[begin], points[end - 1]
        # Ranges across the surrogates stay one: no text holds those.
        ranges.append(f"\\U{first:08x}-\\U{last:08x}")
    return "".join(ranges)


def _made_up_texts(limit: int, case_folds: bool) -> Iterable[str]:
    """Texts that put characters of all kinds beside one another, the same ones each time."""
    kinds = (
        *("'", "'", " ", " ", "\n", "\r", "\t", "0", "7", "a", "Z", "s", "re", "LL", "ve", "'d", "'T"),
        *("!", "/", "_", "-", '"', "\x0b", "\x0c", "\x1c", "\x1f", "\x00", "\x7f", "."),
        *(
            "\x85",
            "\xa0",
            "é",
            "ß",
            "²",
            "ª",
            "×",
            "\u0301",
            "\u0345",
            "ǅ",
            "א",
            "ا",
            "٣",
            "क",
            "ि",
            "๓",
            "ᛮ",
            "Ⅷ",
        ),
        *(
            "’",
            "\u2028",
            "\u200b",
            "\u2003",
            "\u3000",
            "、",
            "中",
            "か",
            "한",
            "\ufeff",
            "\ue000",
            "\ufffd",
            "\u0378",
        ),
        *("😀", "𝒜", "𝟘", "𐒠", "𠀀", "\U000e0001", "\U0010ffff", "🏽"),
        *(() if case_folds else _FOLDED),
    )
    kinds = [kind for kind in kinds if all(ord(character) < limit for character in kind)]
    chosen = random.Random(limit)
    for length in (1, 2, 3, 5, 8, 13, 21, 34):
        for _ in range(60):
            yield "".join(chosen.choices(kinds, k=length))
    yield from (
        "".join(pair) for first in kinds for pair in ((first, "a"), ("a", first), (" ", first), (first, " "))
    )
