"""A tokenizer of the `tokenizers` library word by word: what a word becomes is remembered and looked up.

Byte-level BPE tokenizers (GPT-2's, Llama 3's, Qwen's ...) first cut a text into words by one regular expression; what
becomes of a word does not depend on its neighbours. The library cuts and encodes each word anew, or nearly: it keeps
10,000. Here Python's own `re` cuts, a dict knows most words, and only new ones go to the library: several times as
many bytes a second, and the same ids.

Two engines have to agree on the expression. Character classes are therefore not taken from Python's Unicode tables:
the library's engine is asked for each class which characters it holds. The result is compared with the library on
made-up texts that mix all kinds of characters; where anything differs, or anything in a tokenizer is not known here,
the library encodes whole texts as before.
"""

import json
import random
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
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
# Texts of Unicode's first plane are ours. For classes that reach beyond, `re` is slower than the library.
_LIMIT = 0x10000
# Case-insensitively these equal ASCII letters; not all engines think so.
_FOLDED = "\u017f\u212a"

Ids = tuple[np.ndarray, np.ndarray]  # all ids, int32; the number of ids of each text, int64


def encode_whole(core: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The library's own ids of each text."""
    return [encoding.ids for encoding in core.encode_batch_fast(list(texts), add_special_tokens=False)]


def flatten(encoded: Sequence[Sequence[int]]) -> Ids:
    """Lists of ids as one array, int32 [sum of lengths], and their lengths, int64 [texts]."""
    lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
    return np.fromiter(chain.from_iterable(encoded), np.int32, int(lengths.sum())), lengths


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
        core: what encodes new words, and texts that are not ours.
        expression: cuts a text as `core` does.
        is_ours: whether a text can be cut by it.
    """

    def __init__(
        self, core: tokenizers.Tokenizer, expression: re.Pattern[str], is_ours: Callable[[str], bool]
    ) -> None:
        self._core, self._expression, self._is_ours = core, expression, is_ours
        self._left_out = 0  # so many batches still go to the library whole
        self._forget()

    def encode(self, texts: Sequence[str]) -> Ids:
        """Ids of all texts, one after the other, int32 [sum of lengths]; lengths, int64 [texts]."""
        parts: list[Ids] = []
        for is_long, run in groupby(texts, lambda text: len(text) > _LONG_TEXT):
            group = list(run)
            parts += map(self._encode_long, group) if is_long else [self._encode_short(group)]
        if len(parts) == 1:
            return parts[0]  # a copy of a long text's ids would be the most that is held at a time
        return tuple(map(np.concatenate, zip(*parts))) if parts else flatten([])

    def _encode_short(self, texts: Sequence[str]) -> Ids:
        if self._left_out:
            self._left_out -= 1
            return flatten(encode_whole(self._core, texts))
        self._forget_if_full()
        before, size = self._characters, sum(map(len, texts))
        words = [self._numbers_of(text) for text in texts]
        self._learn()
        if size >= _LARGE_BATCH and self._characters - before > _NEW_SHARE * size:
            self._left_out = _LEFT_OUT
        counts = np.diff(np.frombuffer(self._ends, np.int64))
        totals = np.array([counts[numbers].sum() for numbers in words], np.int64)
        return self._ids_of(np.concatenate(words)), totals

    def _encode_long(self, text: str) -> Ids:
        """Some ten thousand words at a time: neither the words nor what is known of them need fit in memory."""
        matches = (match[0] for match in self._expression.finditer(text)) if self._is_ours(text) else iter(())
        ids, covered = array("i"), 0  # grows without a second copy of it
        while words := list(islice(matches, _PIECE)):
            self._forget_if_full()
            numbers = np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))
            self._learn()
            ids.frombytes(self._ids_of(numbers).view(np.uint8))
            covered += sum(map(len, words))
        if covered != len(text):
            return flatten(encode_whole(self._core, [text]))
        return np.frombuffer(ids, np.int32), np.array([len(ids)], np.int64)

    def _forget_if_full(self) -> None:
        if len(self._numbers) > _MOST_WORDS or self._characters > _MOST_CHARACTERS:
            self._forget()

    def _forget(self) -> None:
        self._numbers = _Numbers()
        self._ids = array("i")  # of all words, in the order of their numbers
        self._ends = array("q", [0])  # where each word's ids end
        self._characters = 0

    def _numbers_of(self, text: str) -> np.ndarray:  # int32 [words]
        """A text as numbers of words; one that is not ours is one word."""
        words = self._expression.findall(text) if self._is_ours(text) else [text]
        # What no alternative of the expression matches would be lost: the library cuts it out as a word of its own.
        if len("".join(words)) != len(text):
            words = [text]
        return np.fromiter(map(self._numbers.__getitem__, words), np.int32, len(words))

    def _learn(self) -> None:
        """Have the library encode the words that are new."""
        new, self._numbers.new = self._numbers.new, []
        for first in range(0, len(new), _PIECE):
            ids, counts = flatten(encode_whole(self._core, new[first : first + _PIECE]))
            self._ids.frombytes(ids.view(np.uint8))
            self._ends.frombytes((self._ends[-1] + np.cumsum(counts)).view(np.uint8))
        self._characters += sum(map(len, new))

    def _ids_of(self, numbers: np.ndarray) -> np.ndarray:  # int32 [ids]
        """The ids of words, one after the other."""
        ids, ends = np.frombuffer(self._ids, np.int32), np.frombuffer(self._ends, np.int64)
        stops = ends[numbers + 1]
        counts = stops - ends[numbers]
        # Place i of the result reads behind its word's begin as far as it lies behind the word's first place.
        places = np.cumsum(counts)
        total = int(places[-1]) if len(places) else 0
        return ids[np.arange(total) + np.repeat(stops - places, counts)]


def word_encoder(core: tokenizers.Tokenizer) -> WordEncoder | None:
    """A WordEncoder for `core`, or None where it does more than cut by one expression and encode word by word."""
    described = json.loads(core.to_str())
    pattern = _pattern_of(described["pre_tokenizer"])
    normalizer = described["normalizer"]
    added = [token["content"] for token in described["added_tokens"] if not token["special"]]
    known_normalizer = normalizer is None or normalizer["type"] in _HARMLESS_FOR_ASCII
    if pattern is None or not known_normalizer or len(added) > _MOST_ADDED_TOKENS:
        return None
    expression = None if described["model"].get("dropout") else checked_expression(core, pattern)
    if expression is None:
        return None
    foreign = [*added, *(_FOLDED if "(?i" in pattern else "")]

    def is_ours(text: str) -> bool:
        # Characters beyond the first plane take two units of UTF-16.
        known = text.isascii() or (normalizer is None and len(text.encode("utf-16-le")) == 2 * len(text))
        return known and not any(part in text for part in foreign)

    return WordEncoder(core, expression, is_ours)


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


def checked_expression(core: tokenizers.Tokenizer, pattern: str) -> re.Pattern[str] | None:
    """The expression for Python's `re`, None where it cuts a made-up text in another way than `core`."""
    expression = translate(pattern)
    if expression is None:
        return None
    for text in _made_up_texts("(?i" in pattern):
        cut = core.pre_tokenizer.pre_tokenize_str(text)
        words = [text[begin:end] for _, (begin, end) in cut]
        if expression.findall(text) != words or any(expression.findall(word) != [word] for word in words):
            return None
    return expression


def translate(pattern: str) -> re.Pattern[str] | None:
    """An expression of the library's engine (Oniguruma) for Python's `re`, for characters below _LIMIT.

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
            if in_class and negated:
                return None
            ranges = _members(text[0] + text[1].lower() + text[2:])
            out.append(ranges if in_class else f"[{'^' if negated else ''}{ranges}]")
            continue
        if text == "&&" or text in (("[", "[^") if in_class else (".", "^", "$")):
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


@cache
def _members(members: str) -> str:
    """The characters of a class such as \\p{L} as ranges for a class of `re`, by the library's own engine."""
    points = [*range(0xD800), *range(0xE000, _LIMIT)]
    finder = pre_tokenizers.Split(Regex(members + "+"), "removed", invert=True)
    spans = [span for _, span in finder.pre_tokenize_str("".join(map(chr, points)))]
    # Ranges across the surrogates stay one: no text holds those.
    return "".join(f"\\U{points[begin]:08x}-\\U{points[end - 1]:08x}" for begin, end in spans)


def _made_up_texts(case_folds: bool) -> Iterator[str]:
    """Texts that put characters of all kinds beside one another, the same ones each time."""
    ascii_kinds = [*"'' !/_-\".07aZs\n\r\t\x0b\x0c\x1c\x1f\x00\x7f", "re", "LL", "ve", "'d", "'T"]
    kinds = [
        *ascii_kinds,
        *"\x85\xa0éß²ª×\u0301\u0345ǅאا٣कि๓ᛮⅧ’\u2028\u200b\u2003\u3000、中か한\ufeff\ue000\ufffd\u0378",
        *("" if case_folds else _FOLDED),
    ]
    chosen = random.Random(0)
    for length in (1, 2, 3, 5, 8, 13, 21, 34):
        for of in 60 * [ascii_kinds] + 120 * [kinds]:
            yield "".join(chosen.choices(of, k=length))
    for kind in kinds:
        yield from (f"{kind}a", f"a{kind}", f" {kind}", f"{kind} ")
