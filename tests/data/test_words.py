"""Word by word against the library itself, which encodes whole texts: the same ids for every tokenizer."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from megatron_lite.data import words
from megatron_lite.data.words import GPT2_PATTERN, translate, word_encoder

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "it's 2024, and the cat'll sit \n\n on   the mat; größer 中文 字 123456 def f(x):\n\treturn x 😀"
] * 9


def make(pattern, normalizer=None, added=()):
    core = Tokenizer(models.BPE())
    if pattern is None:
        core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        core.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_of])
    core.decoder = decoders.ByteLevel()
    core.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, special_tokens=["<|end|>"])
    )
    core.add_tokens(list(added))
    core.encode_special_tokens = True
    return core


TOKENIZERS = {
    "gpt2": make(None),
    "llama3": make(LLAMA3),
    "o200k": make(O200K),
    "nfc": make(LLAMA3, normalizers.NFC()),
    "added": make(None, added=[AddedToken("<think>", normalized=False), AddedToken("x )", lstrip=True)]),
}
ENCODERS = {name: word_encoder(core) for name, core in TOKENIZERS.items()}
KINDS = list("' \n\t\r09azSsLlTt!,_-\x1c\x85\xa0éßſK²ª\u0301אक中か’\u2028\u3000😀𝒜𝟘𐒠𠀀\U000e0001") + [
    "'ll",
    "'RE",
    "<|end|>",
    "<think>",
    "x )",
    "e\u0301",
    "   ",
    "\n\n",
    "12345",
]


def assert_equal(name, texts):
    ids, lengths = ENCODERS[name].encode(texts)
    wanted = [e.ids for e in TOKENIZERS[name].encode_batch(texts, add_special_tokens=False)]
    assert lengths.tolist() == [len(text) for text in wanted]
    assert ids.tolist() == [number for text in wanted for number in text]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=150)
@given(data=st.data())
def test_the_same_ids_as_the_library(name, data):
    mixed = st.lists(st.sampled_from(KINDS), max_size=30).map("".join)
    anything = st.text(max_size=30)
    assert_equal(name, data.draw(st.lists(st.one_of(mixed, anything), max_size=5)))


@pytest.mark.parametrize("name", TOKENIZERS)
def test_words_are_looked_up_only_where_that_is_right(name):
    encoder = ENCODERS[name]
    assert encoder is not None
    assert encoder._is_ours("plain text 1")
    assert encoder._is_ours("größer 中") == (name != "nfc")
    assert encoder._is_ours("<think> so") == (name != "added")


def test_memory_is_bounded_and_what_is_forgotten_is_learnt_again(monkeypatch):
    monkeypatch.setattr(words, "_MOST_WORDS", 20)
    for number in range(30):
        assert_equal("gpt2", [f"word{number} other{number} and the same", "the same"])
        assert len(ENCODERS["gpt2"]._numbers) <= 30


def test_a_long_text_goes_piece_by_piece(monkeypatch):
    monkeypatch.setattr(words, "_LONG_TEXT", 50)
    monkeypatch.setattr(words, "_PIECE", 7)
    assert_equal("llama3", ["it's a long text, " * 40, "", "short", "größer 😀 " * 30])
    monkeypatch.setattr(words, "_MOST_WORDS", 20)
    assert_equal("llama3", [" ".join(f"word{number} and" for number in range(500))])
    assert len(ENCODERS["llama3"]._numbers) <= 20 + 7
    assert_equal("added", ["<think> " * 20, "so " * 50])
    assert_equal("nfc", ["e\u0301 " * 40])


def test_text_that_never_repeats_goes_to_the_library(monkeypatch):
    monkeypatch.setattr(words, "_LARGE_BATCH", 100)
    monkeypatch.setattr(words, "_LEFT_OUT", 2)
    encoder = word_encoder(TOKENIZERS["gpt2"])
    tried = []
    for batch in range(4):
        known = len(encoder._numbers)
        texts = [" ".join(f"{chr(0x4E00 + 50 * batch + n)}{n}" for n in range(50)), "a\x1fb"]
        ids, _ = encoder.encode(texts)
        wanted = TOKENIZERS["gpt2"].encode_batch(texts, add_special_tokens=False)
        assert ids.tolist() == [number for text in wanted for number in text.ids]
        tried.append(len(encoder._numbers) > known)
    assert tried == [True, False, False, True]


@pytest.mark.parametrize(
    "pattern",
    [r"\p{L}+|.", r"[\p{L}[0-9]]+", r"^\s+", r"[\P{L}]", r"\h+", r"a{2}+", r"[a-z&&[^b]]", r"\p{L}+$", r"\X"],
)
def test_an_expression_that_might_mean_something_else_is_left_to_the_library(pattern):
    assert translate(pattern) is None


def test_what_an_expression_does_not_match_is_not_lost():
    assert word_encoder(make(r"\p{L}+|\s+")) is None  # punctuation between the matches: seen on made-up texts
    assert translate(GPT2_PATTERN).findall("it's 5") == ["it", "'s", " 5"]


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
    ],
)
def test_other_tokenizers_are_left_to_the_library(change):
    core = Tokenizer.from_str(json.dumps(json.loads(TOKENIZERS["gpt2"].to_str()) | change))
    assert word_encoder(core) is None


def test_no_text_no_ids():
    ids, lengths = ENCODERS["gpt2"].encode(["", ""])
    assert ids.dtype == np.int32 and not len(ids) and lengths.tolist() == [0, 0]
    ids, lengths = ENCODERS["gpt2"].encode([])
    assert not len(ids) and not len(lengths)
