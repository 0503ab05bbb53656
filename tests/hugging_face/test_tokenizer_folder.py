"""Tokenizers of every kind as folders: AutoTokenizer gives the same ids and the same text back."""

import io
import json

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from megatron_lite.config import ConfigError, DataConfig
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.hugging_face.sentencepiece_conversion import convert_sentencepiece
from megatron_lite.hugging_face.tokenizer_folder import PROBE_TEXTS, check_tokenizer, write_tokenizer
from tests import local_tokenizers

EXACT = {
    "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False,
    "add_dummy_prefix": False,
    "allow_whitespace_only_pieces": True,
}
# SentencePiece models as people make them: ours, Llama's, the library's defaults.
MODELS = {
    "ours": {"model_type": "bpe", "byte_fallback": True, "split_digits": True} | EXACT,
    "llama": {"model_type": "bpe", "byte_fallback": True, "split_digits": True}
    | EXACT
    | {"add_dummy_prefix": True},
    "bpe-defaults": {"model_type": "bpe"},
    "unigram-defaults": {"model_type": "unigram"},
    "unigram-exact": {"model_type": "unigram", "byte_fallback": True} | EXACT,
    # Lines stay, spaces are trimmed: at the ends of the text, not at those of its lines.
    "bpe-identity": {"model_type": "bpe", "normalization_rule_name": "identity"},
    "unigram-identity": {"model_type": "unigram", "normalization_rule_name": "identity"},
    # Few characters have a piece, "/" has none: "</s>" in a text is still no end of document.
    "unigram-few": {
        "model_type": "unigram",
        "normalization_rule_name": "identity",
        "character_coverage": 0.98,
    },
    "user-defined": {"model_type": "bpe", "byte_fallback": True, "user_defined_symbols": ["<tool>", "<call>"]}
    | EXACT,
}
OTHERS = ("HuggingFaceTokenizer", "GPT2BPETokenizer", "TikTokenizer")
WORDS = st.text(
    st.one_of(st.sampled_from(" \n\tabcdefthe</s>12▁"), st.characters(exclude_categories=("Cs",))),
    max_size=40,
)


def sentencepiece_file(folder, **options):
    """Train a small model on multilingual lines."""
    lines = [
        line for text in (*PROBE_TEXTS, *local_tokenizers.TEXT) for line in text.split("\n") if line.strip()
    ]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*lines * 3, "if a < b > c / s | t _ u: <p> 0xABCDEF"]),
        model_writer=model,
        vocab_size=900,
        hard_vocab_limit=False,
        control_symbols=["<|endoftext|>"],
        minloglevel=2,
        # Some characters of the texts stay without a piece: they become bytes or unknown.
        **({"character_coverage": 0.98 if options["model_type"] == "bpe" else 1.0} | options),
    )
    path = folder / "sp.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """{kind: (our tokenizer, AutoTokenizer of the folder)}."""
    made = {}
    for name, options in MODELS.items():
        path = sentencepiece_file(tmp_path_factory.mktemp(name), **options)
        flags = DataConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(path))
        made[name] = build_tokenizer(flags)
    for kind in OTHERS:
        made[kind] = local_tokenizers.build(kind, tmp_path_factory.mktemp(kind))
    loaded = {}
    for name, tokenizer in made.items():
        folder = tmp_path_factory.mktemp(f"{name}-out")
        (folder / "config.json").write_text(
            json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
        )
        assert write_tokenizer(tokenizer, folder, max_length=1 << 20)
        assert check_tokenizer(tokenizer, folder) > 100
        loaded[name] = tokenizer, AutoTokenizer.from_pretrained(folder)
    return loaded


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
@settings(max_examples=60)
@given(text=WORDS)
def test_any_text_has_equal_ids(pairs, name, text):
    ours, theirs = pairs[name]
    ids = ours.encode(text)
    assert theirs.encode(text, add_special_tokens=False, split_special_tokens=True) == ids


@pytest.mark.parametrize("name", [*MODELS, *OTHERS])
def test_text_comes_back_the_same(pairs, name):
    ours, theirs = pairs[name]
    for text in PROBE_TEXTS:
        ids = ours.encode(text)
        assert theirs.decode(ids, clean_up_tokenization_spaces=False) == ours.decode(ids)
    if name in ("ours", "GPT2BPETokenizer", "TikTokenizer"):
        for text in PROBE_TEXTS[:-5]:
            assert theirs.decode(theirs.encode(text)) == text


@pytest.mark.parametrize("name", [*MODELS, "GPT2BPETokenizer", "TikTokenizer"])
def test_a_plain_call_is_what_training_saw(pairs, name):
    """No flag needed: no bos or eos is added, text that spells a special token stays text."""
    ours, theirs = pairs[name]
    text = "</s> a <s><|endoftext|> b"
    assert theirs(text)["input_ids"] == ours.encode(text)
    assert theirs.eos_token_id == ours.eod
    assert theirs.decode([ours.eod], skip_special_tokens=True) == ""


def test_a_tokenizer_that_transformers_reads_otherwise_is_refused(pairs, tmp_path):
    """transformers 5 makes every tokenizer of a qwen2 model a Qwen2Tokenizer, whatever the folder says."""
    ours, _ = pairs["ours"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    write_tokenizer(ours, tmp_path, 64)
    if type(AutoTokenizer.from_pretrained(tmp_path)).__name__ != "Qwen2Tokenizer":
        pytest.skip("this release of transformers takes the folder's word")
    with pytest.raises(ConfigError, match="Qwen2Tokenizer gives other ids than SentencePieceTokenizer"):
        check_tokenizer(ours, tmp_path)


def test_a_damaged_table_is_caught(pairs, tmp_path):
    ours, _ = pairs["ours"]
    write_tokenizer(ours, tmp_path, 64)
    table = json.loads((tmp_path / "tokenizer.json").read_text())
    merges = table["model"]["merges"]
    table["model"]["merges"] = merges[::-1]
    (tmp_path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(ConfigError, match="other ids"):
        check_tokenizer(ours, tmp_path)


def test_refusals(tmp_path):
    for options, words in (
        ({"model_type": "word"}, "type 3"),
        ({"model_type": "bpe", "treat_whitespace_as_suffix": True}, "spaces after words"),
    ):
        path = sentencepiece_file(tmp_path, **options)
        with pytest.raises(ConfigError, match=words):
            convert_sentencepiece(path.read_bytes(), "sp.model")


def test_a_tokenizer_without_files(tmp_path):
    tokenizer = build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 10)
    assert not write_tokenizer(tokenizer, tmp_path, 64)
    assert not list(tmp_path.iterdir())
