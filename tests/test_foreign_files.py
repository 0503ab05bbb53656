"""Whatever lies where a file is wanted, every reader says what it is."""

import gzip
from pathlib import Path

import pytest

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.config import ConfigError, DataConfig
from megatron_lite.data.build import _read_counts
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed.environment import Environment
from megatron_lite.files.reading import read_object, read_text
from megatron_lite.hugging_face.folder import _open_weights
from megatron_lite.planning.trace import read_trace
from megatron_lite.preprocessing.text_files import identify

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize 4863000\n" % (b"4" * 64)
CONTENTS = {
    "HTML": (
        b"<!DOCTYPE html>\n<html><head><title>404 Not Found</title></head></html>\n",
        "is an HTML or XML page",
    ),
    "XML": (b'<?xml version="1.0"?>\n<Error><Code>NoSuchKey</Code></Error>', "is an XML page"),
    "S3": (b"<Error><Code>AccessDenied</Code></Error>", "is an HTML or XML page"),
    "LFS": (LFS, "git lfs pull"),
    "annex": (b"/annex/objects/SHA256E-s12--" + b"4" * 64 + b"\n", "git annex get"),
    "BOM": (b'\xef\xbb\xbf{"a": 1}\n', "byte order mark"),
    "UTF-16": ('\ufeff{"a": 1}\n'.encode("utf-16-le"), "UTF-16"),
    "gzip": (gzip.compress(b'{"a": 1}\n' * 20), "gzip"),
    "empty": (b"", "is empty"),
}


def _tokenizer(kind, **files):
    return lambda path: build_tokenizer(DataConfig(tokenizer_type=kind, **{k: str(path) for k in files}))


def _special(path):
    """tokenizer_config.json beside a good tokenizer.json."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.BPE(vocab={"</s>": 0}, merges=[])).save(str(path.parent / "tokenizer.json"))
    return build_tokenizer(
        DataConfig(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(path.parent))
    )


def _merges(path):
    (path.parent / "vocab.json").write_text('{"<|endoftext|>": 0}')
    files = {"vocab_file": str(path.parent / "vocab.json"), "merge_file": str(path)}
    return build_tokenizer(DataConfig(tokenizer_type="GPT2BPETokenizer", **files))


def _documents(path):
    source = identify(path)
    if source.problem is not None:
        raise ConfigError(source.problem[1])


READERS = {
    "config.json": read_object,
    "model.safetensors": _open_weights,
    "pytorch_model.bin": _open_weights,
    "tokenizer.json": _tokenizer("HuggingFaceTokenizer", tokenizer_model=1),
    "tokenizer_config.json": _special,
    "tokenizer.model": _tokenizer("SentencePieceTokenizer", tokenizer_model=1),
    "ranks.tiktoken": _tokenizer("TikTokenizer", tokenizer_model=1),
    "vocab.json": _tokenizer("GPT2BPETokenizer", vocab_file=1, merge_file=1),
    "merges.txt": _merges,
    "x.idx": lambda path: (path.with_suffix(".bin").write_bytes(b""), IndexedDataset(path.with_suffix(""))),
    "corpus.jsonl": _documents,
    "data.args": lambda path: read_text(str(path), "--data-args-path"),
    "counts.json": lambda path: _read_counts(str(path)),
    "timeline.json": read_trace,
    "flags.txt": lambda path: parse_arguments([f"@{path}"], Environment()),
}
# Read as what they are: compressed or marked JSON lines, GPT-2's first line of no merges, an empty file of words.
READ = {
    ("corpus.jsonl", "BOM"),
    ("corpus.jsonl", "gzip"),
    ("corpus.jsonl", "empty"),
    ("merges.txt", "empty"),
    ("flags.txt", "empty"),
    ("data.args", "empty"),
}


@pytest.mark.parametrize("name", READERS)
def test_every_reader_says_what_the_file_is(name, tmp_path):
    path = tmp_path / name
    for kind, (content, words) in CONTENTS.items():
        if (name, kind) in READ:
            continue
        path.write_bytes(content)
        with pytest.raises(ConfigError) as caught:
            READERS[name](path)
        assert words in str(caught.value), (kind, str(caught.value))


def test_tokens_that_are_none(tmp_path):
    good = Path(__file__).parent / "golden" / "ds_u16"
    (tmp_path / "x.idx").write_bytes(good.with_suffix(".idx").read_bytes())
    (tmp_path / "x.bin").write_bytes(LFS)
    with pytest.raises(ConfigError, match=r"wanted .* by the lengths in .*git lfs pull"):
        IndexedDataset(tmp_path / "x")
