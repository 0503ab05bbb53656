"""Tokenizers of every family: exact round trips, special tokens that text never becomes, clear refusals."""

import base64
import json
import shutil

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from megatron_lite.config import ConfigError, DataConfig
from megatron_lite.data.tokenizer import build_tokenizer
from tests import local_tokenizers

FAMILIES = ("SentencePieceTokenizer", "HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer")
TEXTS = (
    "The quick brown fox",
    "  two  leading, trailing  ",
    "def f(x):\n\treturn x\r\n\n\n    'done'",
    "我能吞下玻璃而不伤身体 👩‍👩‍👧‍👦 naïve ½ ﬁ \u00a0\u200b\ufeff",
    "\x00\x01\x7f\u0085\u2028",
    " ",
    "",
)
SPECIAL = ("</s>", "<s>", "<unk>", "<|endoftext|>", "<mask>", "<SPECIAL_8>", "a <|endoftext|> b </s> c")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return {kind: local_tokenizers.build(kind, tmp_path_factory.mktemp(kind)) for kind in FAMILIES}


@pytest.mark.parametrize("kind", FAMILIES)
def test_text_comes_back(made, kind):
    tokenizer = made[kind]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= number < tokenizer.vocab_size for number in ids)
    assert tokenizer.encode_batch(TEXTS) == [tokenizer.encode(text) for text in TEXTS]
    assert tokenizer.encode_batch([]) == []


@settings(max_examples=150)
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\u2581"), max_size=40))
def test_any_text_comes_back(made, text):
    for tokenizer in made.values():
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and tokenizer.eod not in ids


@pytest.mark.parametrize("kind", FAMILIES)
def test_text_never_becomes_a_special_token(made, kind):
    tokenizer = made[kind]
    for text in SPECIAL:
        ids = tokenizer.encode(text)
        assert not set(ids) & set(tokenizer.special_ids.values()), text
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", [*FAMILIES, "NullTokenizer"])
@pytest.mark.parametrize("text", ["half \ud83d pair", "low \ude00"])
def test_lone_surrogates_are_refused(tmp_path, kind, text):
    with pytest.raises(ConfigError, match=r"lone surrogate \\ud[8e]"):
        local_tokenizers.build(kind, tmp_path).encode_batch(["fine", text])


def test_sentencepiece_is_the_library_without_bos_and_eos(made):
    tokenizer = made["SentencePieceTokenizer"]
    bare = sentencepiece.SentencePieceProcessor(model_file=str(tokenizer.files()[0]))
    for text in TEXTS:
        assert tokenizer.encode(text) == bare.encode(text)
    assert tokenizer.eod == bare.eos_id() and tokenizer.vocab_size == bare.get_piece_size()


def test_gpt2_files_and_tokenizer_json_agree_with_transformers(made):
    folder = made["HuggingFaceTokenizer"].files()[0].parent
    reference = PreTrainedTokenizerFast.from_pretrained(folder)
    for text in TEXTS:
        expected = reference.encode(text, add_special_tokens=False)
        assert made["HuggingFaceTokenizer"].encode(text) == expected
        assert made["GPT2BPETokenizer"].encode(text) == expected
    for kind in ("HuggingFaceTokenizer", "GPT2BPETokenizer"):
        assert made[kind].eod == reference.eos_token_id and made[kind].vocab_size == len(reference)


def test_tiktoken_ids_follow_the_special_ones(made, tmp_path):
    tokenizer = made["TikTokenizer"]
    assert tokenizer.encode("xy") == [10 + ord("x"), 10 + ord("y")]
    assert tokenizer.encode("the") == [10 + 256 + 1]  # th + e, the longer merge
    assert tokenizer.vocab_size == 10 + 256 + 5 and tokenizer.eod == 2
    # Megatron's own form of the file
    rows = [line.split() for line in tokenizer.files()[0].read_text().splitlines()]
    content = [{"rank": int(rank), "token_bytes": token, "token_str": ""} for token, rank in rows]
    (tmp_path / "vocab.json").write_text(json.dumps(content))
    flags = {"tokenizer_model": str(tmp_path / "vocab.json"), "tiktoken_num_special_tokens": 10}
    other = build_tokenizer(DataConfig(tokenizer_type="TikTokenizer", **flags))
    assert [other.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    cut = build_tokenizer(DataConfig(tokenizer_type="TikTokenizer", **flags), 268)
    assert cut.vocab_size == 268 and cut.decode(cut.encode("in the end")) == "in the end"


def test_null_tokenizer():
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000)
    assert (tokenizer.vocab_size, tokenizer.eod) == (1001, 1000)
    assert tokenizer.encode("5 17 999") == [5, 17, 999] and tokenizer.decode([5, 17]) == "5 17"
    assert tokenizer.encode("ab我") == [97, 98, ord("我") % 1000]
    with pytest.raises(ConfigError, match="1,000"):
        tokenizer.encode("5 1000")


def test_fingerprint_is_of_the_content(tmp_path):
    first = local_tokenizers.build("SentencePieceTokenizer", tmp_path)
    copy = shutil.copy(first.files()[0], tmp_path / "other.model")
    again = build_tokenizer(DataConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=str(copy)))
    assert again.fingerprint == first.fingerprint
    local_tokenizers.write_sentencepiece(tmp_path / "other.model", 419)
    other = build_tokenizer(DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(copy)))
    assert other.fingerprint != first.fingerprint
    sizes = [build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), n).fingerprint for n in (5, 6)]
    assert sizes[0] != sizes[1]


def refusals(folder):
    """(kind, flags, what the sentence has to hold)"""
    (folder / "text.txt").write_text("no tokenizer")
    (folder / "empty").mkdir()
    hf = local_tokenizers.write_byte_level(folder / "noeos")
    (hf / "tokenizer_config.json").write_text('{"eos_token": "<nowhere>"}')
    local_tokenizers.write_sentencepiece(folder / "tokenizer.model")
    gap = f"{base64.b64encode(b'a').decode()} 0\n{base64.b64encode(b'b').decode()} 2\n"
    (folder / "gap.tiktoken").write_text(gap)
    text = str(folder / "text.txt")
    return [
        (None, {}, "--tokenizer-type is not given"),
        ("SentencePieceTokenizer", {}, "needs --tokenizer-model"),
        ("SentencePieceTokenizer", {"tokenizer_model": "/nowhere"}, "'/nowhere' does not exist"),
        ("SentencePieceTokenizer", {"tokenizer_model": text}, "is not a SentencePiece model"),
        ("HuggingFaceTokenizer", {"tokenizer_model": text}, "cannot be read as a tokenizer.json"),
        ("HuggingFaceTokenizer", {"tokenizer_model": str(folder / "empty")}, "has no tokenizer.json"),
        ("HuggingFaceTokenizer", {"tokenizer_model": str(folder)}, "--tokenizer-type SentencePieceTokenizer"),
        ("HuggingFaceTokenizer", {"tokenizer_model": str(hf)}, "'<nowhere>', which is no token"),
        ("GPT2BPETokenizer", {"vocab_file": text}, "needs --merge-file"),
        ("GPT2BPETokenizer", {"vocab_file": text, "merge_file": text}, "cannot be read as a vocab.json"),
        ("TikTokenizer", {"tokenizer_model": text}, "is no tiktoken vocabulary"),
        ("TikTokenizer", {"tokenizer_model": str(folder / "gap.tiktoken")}, "wanted each of 0, 1, 2"),
        ("NullTokenizer", {}, "needs --vocab-size"),
    ]


@pytest.mark.parametrize("number", range(13))
def test_refusals(tmp_path, number):
    kind, flags, sentence = refusals(tmp_path)[number]
    with pytest.raises(ConfigError) as caught:
        build_tokenizer(DataConfig(tokenizer_type=kind, **flags))
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_a_vocabulary_larger_than_vocab_size_is_refused(tmp_path):
    path = str(local_tokenizers.write_sentencepiece(tmp_path / "t.model"))
    with pytest.raises(ConfigError, match="--vocab-size is 100, but the tokenizer .* has 420 tokens"):
        build_tokenizer(DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path), 100)
