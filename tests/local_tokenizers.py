"""Small tokenizers of every family, made on the spot: a test never relies on a hub."""

import base64
import io
import json
from pathlib import Path

import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_lite.config import DataConfig
from megatron_lite.data.tokenizer import build_tokenizer

TEXT = [
    "def tokenize(self, text):\n    return [self.vocab[word] for word in text.split()]\n",
    "The quick brown fox jumps over the lazy dog, and then it jumps back again.",
    "Zażółć gęślą jaźń; 我能吞下玻璃而不伤身体; أنا قادر على أكل الزجاج; 1234567890",
] * 20


def write_sentencepiece(path, vocab_size=420):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in TEXT for line in text.splitlines()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=False,
        minloglevel=2,
    )
    Path(path).write_bytes(model.getvalue())
    return path


def write_byte_level(folder, vocab_size=420):
    """tokenizer.json, tokenizer_config.json, vocab.json, merges.txt of one byte-level BPE tokenizer."""
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT, trainer)
    core.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    core.model.save(str(folder))
    return folder


def write_tiktoken(path, merges=(b"th", b"the", b"in", b"return", b"    ")):
    """tiktoken's own lines: the 256 bytes, then some longer tokens."""
    tokens = [bytes([byte]) for byte in range(256)] + list(merges)
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens)]
    Path(path).write_text("".join(lines))
    return path


def build(kind, folder):
    """A tokenizer of the family `kind`, its files made in `folder`."""
    folder = Path(folder)
    if kind == "SentencePieceTokenizer":
        return build_tokenizer(
            DataConfig(tokenizer_type=kind, tokenizer_model=str(write_sentencepiece(folder / "t.model")))
        )
    if kind == "HuggingFaceTokenizer":
        return build_tokenizer(
            DataConfig(tokenizer_type=kind, tokenizer_model=str(write_byte_level(folder / "hf")))
        )
    if kind == "GPT2BPETokenizer":
        made = write_byte_level(folder / "gpt2")
        files = {"vocab_file": str(made / "vocab.json"), "merge_file": str(made / "merges.txt")}
        return build_tokenizer(DataConfig(tokenizer_type=kind, **files))
    if kind == "TikTokenizer":
        model = str(write_tiktoken(folder / "t.tiktoken"))
        flags = {"tokenizer_model": model, "tiktoken_num_special_tokens": 10}
        return build_tokenizer(DataConfig(tokenizer_type=kind, **flags))
    return build_tokenizer(DataConfig(tokenizer_type="NullTokenizer"), 1000)
