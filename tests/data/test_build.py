"""From flags to datasets: splits, blends, per-split paths, errors, the index cache, mock data."""

import itertools
import json
import multiprocessing
import os
import resource
import stat
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_lite.config import (
    Config,
    ConfigError,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    TrainingConfig,
)
from megatron_lite.data.blends import parse_blend, parse_split, plan_data, split_bounds, split_range
from megatron_lite.data.build import build_datasets, sample_counts
from megatron_lite.data.loader import Loader
from tests.pairs import write_documents

GOLDEN = Path(__file__).parent.parent / "golden"
TOKENIZER = SimpleNamespace(eod=0)
SIZES = {"train": 50, "valid": 5, "test": 0}


@pytest.fixture
def corpus(tmp_path):
    """100 documents of 10 to 59 tokens; token values tell the document."""
    return write_documents(tmp_path / "corpus", [[d] * (10 + d % 50) for d in range(1, 101)])


def config_of(cache=None, length=16, vocab_size=1000, evaluation=None, training=None, **data):
    data = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Config(
        model=ModelConfig(vocab_size=vocab_size),
        data=DataConfig(seq_length=length, data_cache_path=str(cache) if cache else None, **data),
        evaluation=EvaluationConfig(**(evaluation or {})),
        training=TrainingConfig(**(training or {})),
    )


def build(config, sizes=None, **more):
    return build_datasets(config, TOKENIZER, sizes or SIZES, **more)


def tokens_of(dataset):
    return np.stack([dataset[i]["tokens"] for i in range(len(dataset))]).tolist()


# --- splits


@pytest.mark.parametrize(
    "text, weights",
    [
        ("969,30,1", [0.969, 0.03, 0.001]),
        ("'90,5,5'", [0.9, 0.05, 0.05]),
        ('"98,2,0"', [0.98, 0.02, 0.0]),
        ("1", [1.0, 0.0, 0.0]),
        ("0, 1", [0.0, 1.0, 0.0]),
        (".9/.1", [0.9, 0.1, 0.0]),
        ("[8 1 1]", [0.8, 0.1, 0.1]),
    ],
)
def test_split_words(text, weights):
    assert parse_split(text) == pytest.approx(weights, abs=0)


@pytest.mark.parametrize(
    "text", ["-1,2,3", "a,b,c", "0,0,0", "", "1,2,3,4", "90,,10", "inf,1,1", "nan,1", "90%,10%"]
)
def test_bad_splits_are_refused(text, corpus):
    with pytest.raises(ConfigError, match="--split is '.*', wanted up to three weights of 0 or more"):
        build(config_of(data_path=[corpus], split=text))


def test_split_ranges_meet_and_cover():
    for words in ("969,30,1", "7,2,1", "1,1,1"):
        bounds = split_bounds(parse_split(words))
        for count in (1, 2, 3, 10, 999, 1000, 12345):
            ranges = [split_range(bounds[name], count) for name in ("train", "valid", "test")]
            assert [ranges[0][0], *(stop for _, stop in ranges)] == [
                0,
                *(first for first, _ in ranges[1:]),
                count,
            ]


def test_splits_share_no_document(corpus, tmp_path):
    datasets = build(
        config_of(tmp_path / "c", data_path=[corpus], split="60,30,10"), {"train": 9, "valid": 9, "test": 9}
    )
    seen = [
        {token for row in tokens_of(dataset) for token in row}
        for dataset in (datasets.train, datasets.valid["valid"], datasets.test["test"])
    ]
    assert max(seen[0]) <= 60 < min(seen[1])
    assert max(seen[1]) <= 90 < min(seen[2])


@pytest.mark.parametrize(
    "documents, data, message",
    [
        (
            [[1] * 40] * 3,
            {"split": "9,1,0"},
            r"--data-path: the valid split of .*/set has no document; --split 9,1,0",
        ),
        (
            [[1] * 40] * 3,
            {"split": "1,9,0"},
            r"the train split of .*/set has no document.* documents 0 to 0 of 3",
        ),
        (
            [[1] * 3] * 4,
            {"split": "1,1,0"},
            r"train split of .*/set has 6 tokens in 2 documents, wanted at least 17",
        ),
        ([[], [], [1] * 40], {"split": "2,1,0"}, r"the train split of .*/set has 0 tokens in 2 documents"),
        ([], {}, r"the train split of .*/set has no document"),
    ],
)
def test_empty_and_short_splits_are_said(documents, data, message, tmp_path):
    prefix = write_documents(tmp_path / "set", documents)
    with pytest.raises(ConfigError, match=message) as caught:
        build(config_of(data_path=[prefix], **data))
    assert "\n" not in str(caught.value)


def test_the_default_split_may_leave_validation_out_but_says_so(tmp_path):
    prefix, lines = write_documents(tmp_path / "set", [[1] * 40] * 5), []
    datasets = build(config_of(data_path=[prefix]), {"train": 5, "valid": 5, "test": 5}, say=lines.append)
    assert (datasets.valid, datasets.test) == ({}, {})
    assert [line.split(": ")[1] for line in lines] == ["train", "no valid set", "no test set"]
    given = replace(config_of(data_path=[prefix], split="969,30,1"), given=frozenset({"split"}))
    with pytest.raises(ConfigError, match="the valid split of .* has no document; --split 969,30,1 gives it"):
        build(given, {"train": 5, "valid": 5, "test": 5})


def test_a_split_nobody_asks_for_is_not_read(tmp_path):
    prefix = write_documents(tmp_path / "set", [[1] * 40] * 3)
    datasets = build(config_of(data_path=[prefix], split="1,0,0"), {"train": 5, "valid": 5, "test": 0})
    assert (datasets.valid, datasets.test) == ({}, {})
    assert len(build(config_of(data_path=[prefix], split="9,1,0"), {"train": 5, "valid": 0}).train) >= 5


# --- where the data is


@pytest.mark.parametrize(
    "data, message",
    [
        ({}, "--data-path is needed"),
        ({"data_path": ["a"], "mock_data": True}, "--data-path and --mock-data cannot be given together"),
        (
            {"data_path": ["a"], "valid_data_path": ["a"]},
            "--data-path and --valid-data-path cannot be given together",
        ),
        (
            {"train_data_path": ["a"], "split": "9,1,0"},
            "--split 9,1,0 and --train-data-path cannot be given together",
        ),
        ({"data_path": ["1", "a", "0", "b"]}, "--data-path: the weight of b is 0, wanted a number above 0"),
        ({"data_path": ["0", "a", "0", "b"]}, "the weight of a is 0, wanted a number above 0"),
        ({"data_path": ["-1", "a", "2", "b"]}, "the weight of a is -1, wanted a number above 0"),
        ({"data_path": ["nan", "a"]}, "the weight of a is nan"),
        ({"data_path": ["inf", "a"]}, "the weight of a is inf"),
        ({"data_path": ["1", "a", "b", "c"]}, "'b' where one is wanted"),
        ({"data_path": ["1", "a", "2"]}, "ends with the weight 2, wanted a prefix"),
        ({"data_path": ["nowhere"]}, "nowhere.bin: cannot be opened .No such file or directory."),
        ({"data_args_path": "nowhere.txt"}, "--data-args-path nowhere.txt cannot be read: No such file"),
        (
            {"per_split_data_args_path": "nowhere.json"},
            "--per-split-data-args-path nowhere.json cannot be read",
        ),
    ],
)
def test_bad_paths_are_one_sentence(data, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(config_of(**data))
    assert "\n" not in str(caught.value)


def test_weights_need_not_sum_to_one():
    assert (
        parse_blend(["30", "a", "70", "b"], "-").weights == parse_blend(["0.3", "a", "0.7", "b"], "-").weights
    )


def test_a_file_of_words_equals_the_words(corpus, tmp_path):
    (tmp_path / "words").write_text(f"0.5 {corpus}\n  0.5\t{GOLDEN / 'ds_u16'}\n")
    named = build(config_of(tmp_path / "c", data_args_path=str(tmp_path / "words"), vocab_size=70_000))
    words = ["0.5", corpus, "0.5", str(GOLDEN / "ds_u16")]
    assert (
        named.fingerprint == build(config_of(tmp_path / "c", data_path=words, vocab_size=70_000)).fingerprint
    )


def test_per_split_paths(corpus, tmp_path):
    other = write_documents(tmp_path / "other", [[500 + d] * 30 for d in range(20)])
    by_flags = build(config_of(tmp_path / "c", train_data_path=[corpus], valid_data_path=[other]))
    (tmp_path / "paths.json").write_text(json.dumps({"train": [corpus], "valid": [other], "test": None}))
    by_file = build(config_of(tmp_path / "c", per_split_data_args_path=str(tmp_path / "paths.json")))
    for datasets in (by_flags, by_file):
        assert {token for row in tokens_of(datasets.train) for token in row} == set(range(1, 101))
        assert min(min(row) for row in tokens_of(datasets.valid["valid"])) >= 500
        assert datasets.test == {}
    # One source, even with a weight, is no blend here: no surplus is asked for, as in Megatron-core.
    weighted = build(config_of(tmp_path / "c", train_data_path=["1.0", corpus], valid_data_path=[other]))
    assert weighted.fingerprint == by_flags.fingerprint


def test_validation_sets_by_name(corpus, tmp_path):
    other = write_documents(tmp_path / "other", [[500 + d] * 30 for d in range(20)])
    paths = {"train": [corpus], "valid": {"code": [other], "mix": ["3", other, 1, corpus]}}
    (tmp_path / "paths.json").write_text(json.dumps(paths))
    datasets = build(config_of(tmp_path / "c", per_split_data_args_path=str(tmp_path / "paths.json")))
    assert list(datasets.valid) == ["code", "mix"]
    sources = [min(row) >= 500 for row in tokens_of(datasets.valid["mix"])]
    assert len(sources) == 6  # ceil(5 * 0.75) + ceil(5 * 0.25)
    assert sum(sources) == 4


@pytest.mark.parametrize(
    "stored, message",
    [
        ("{", "is not JSON"),
        ('["a"]', "holds a list, wanted an object"),
        ('{"training": ["a"]}', "holds training, wanted"),
        ('{"train": {"a": ["b"]}}', "train is .*, wanted words"),
        ('{"train": ["1", "a", "0", "b"]}', "train: the weight of b is 0"),
    ],
)
def test_bad_per_split_files(stored, message, tmp_path):
    (tmp_path / "paths.json").write_text(stored)
    with pytest.raises(ConfigError, match=message):
        plan_data(DataConfig(seq_length=16, per_split_data_args_path=str(tmp_path / "paths.json")))


# --- how much


def test_sample_counts_are_megatrons():
    training = {"global_batch_size": 32, "micro_batch_size": 4, "train_iters": 1050}
    evaluation = {"eval_interval": 100, "eval_iters": 10}
    config = replace(
        config_of(training=training, evaluation=evaluation), parallel=ParallelConfig(world_size=1)
    )
    assert sample_counts(config) == {"train": 1050 * 32, "valid": 11 * 10 * 32, "test": 10 * 32}
    whole = replace(config, evaluation=replace(config.evaluation, full_validation=True))
    assert sample_counts(whole) == {"train": 1050 * 32, "valid": None, "test": None}
    off = replace(config, evaluation=replace(config.evaluation, eval_iters=0, full_validation=True))
    assert sample_counts(off) == {"train": 1050 * 32, "valid": 0, "test": 0}
    samples = replace(config, training=replace(config.training, train_iters=None, train_samples=1000))
    assert sample_counts(samples)["train"] == 992  # whole batches


def test_a_blend_takes_what_its_weights_say(corpus, tmp_path):
    lines = []
    words = ["0.2", corpus, "0.8", str(GOLDEN / "ds_u16")]
    config = config_of(tmp_path / "c", data_path=words, split="1,0,0", vocab_size=70_000)
    dataset = build(config, {"train": 1000}, say=lines.append).train
    assert len(dataset) == 1000
    assert np.bincount([dataset.sources.index(dataset.place(i)[0]) for i in range(1000)]).tolist() == [
        200,
        800,
    ]
    # 0.5% more than 200 is 201 samples of 16 tokens: one epoch of 3,450 tokens.
    assert [part.entry.about["samples"] for part in dataset.sources][0] == 215
    assert (
        "train: " + corpus + ": 100 documents, 3,450 tokens, 1 epoch, 215 samples, share 20.00%" in lines[0]
    )
    assert lines[1].endswith("share 80.00%")


def test_a_blend_without_weights_starts_over_and_says_so(corpus, tmp_path):
    lines = []
    words = [corpus, str(GOLDEN / "ds_multi")]
    config = config_of(tmp_path / "c", data_path=words, split="1,0,0", vocab_size=70_000)
    dataset = build(config, {"train": 5000}, say=lines.append).train
    assert len(dataset) == sum(len(part) for part in dataset.sources) < 5000
    assert "5,000 samples are wanted" in lines[-1]
    assert len(build(config, {"train": 100}).train) == 100


def test_full_validation_reads_every_token_once_and_pads(corpus, tmp_path):
    config = config_of(
        tmp_path / "c",
        data_path=[corpus],
        split="50,50,0",
        evaluation={"full_validation": True},
        training={"micro_batch_size": 4},
    )
    dataset = build(config, {"train": 5, "valid": None}).valid["valid"]
    tokens = sum(10 + d % 50 for d in range(51, 101))
    assert len(dataset) == -(-(tokens - 1) // 16)
    counted = 0
    for rank in range(2):
        loader = Loader(dataset, config, rank, 2, 0)
        for _ in range(-(-len(dataset) // 8)):
            counted += int((loader.next_batch(8)["labels"] != -100).sum())
        loader.close()
    assert counted == tokens - 1


# --- token ids


def test_a_token_beyond_the_vocabulary_is_found_at_start(tmp_path):
    documents = [[d] * 20 for d in range(30)]
    documents[29] = [1] * 5 + [999] + [1] * 20
    prefix = write_documents(tmp_path / "set", documents)
    build(config_of(tmp_path / "c", data_path=[prefix], split="1,0,0", vocab_size=1000))
    message = r"set.bin: document 29, sequence 29, token 5 is token id 999, wanted 0 to 998"
    with pytest.raises(ConfigError, match=message):
        build(config_of(tmp_path / "c", data_path=[prefix], split="1,0,0", vocab_size=999))


def test_one_that_the_sampled_check_misses_is_found_by_the_loader(tmp_path):
    documents = [[1] * 20 for _ in range(2000)]
    documents[1001] = [1] * 5 + [999] + [1] * 20
    prefix = write_documents(tmp_path / "set", documents)
    config = config_of(
        tmp_path / "c", data_path=[prefix], split="1,0,0", vocab_size=999, training={"micro_batch_size": 1}
    )
    dataset = build(config, {"train": 2000}).train
    loader = Loader(dataset, config, 0, 1, 0)
    message = (
        r"set.bin: document 1,001, token 5 is token id 999, wanted 0 to 998: the data was made with another"
    )
    with pytest.raises(ConfigError, match=message):
        for _ in range(len(dataset)):
            loader.next_batch(1)
    loader.close()


def test_samples_past_4_gigabytes(tmp_path):
    """4,000,000,005 tokens of uint16, mostly hole, with ten marks in the last gigabyte."""
    lengths = np.full(41, 10**8, dtype="<i4")
    lengths[40] = 5
    pointers = (np.cumsum(lengths, dtype="<i8") - lengths) * 2
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 41, 42)
    (tmp_path / "big.idx").write_bytes(
        head + lengths.tobytes() + pointers.tobytes() + np.arange(42).tobytes()
    )
    mark = int(pointers[38]) + 2 * 60_000_000
    with (tmp_path / "big.bin").open("wb") as file:
        file.seek(mark)
        file.write(np.arange(1, 11, dtype="<u2").tobytes())
        file.truncate(2 * int(lengths.sum(dtype=np.int64)))
    config = config_of(tmp_path / "c", data_path=[str(tmp_path / "big")], split="1,0,0", length=8191)
    dataset = build(config, {"train": None}).train
    assert len(dataset) == 4 * 10**9 // 8191
    arrays = dataset.entry.arrays
    before = np.flatnonzero(arrays["document_index"] == 38)[0]
    starts = arrays["sample_index"]
    place = np.flatnonzero((starts[:, 0] == before) & (starts[:, 1] <= 60_000_000))[-1]
    sample = dataset[int(np.flatnonzero(arrays["shuffle_index"] == place)[0])]
    offset = 60_000_000 - int(starts[place, 1])
    seen = np.concatenate([sample["tokens"], sample["labels"][-1:]])
    assert seen[offset : offset + 10].tolist() == [*range(1, 11)][: 8192 - offset]
    assert np.count_nonzero(seen) == min(10, 8192 - offset)


# --- the index cache


def entries(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def test_arrays_are_built_once_and_then_read(corpus, tmp_path):
    config = config_of(tmp_path / "c", data_path=[corpus], split="9,1,0")
    first = build(config)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()}
    assert len(before) == 2
    again = build(config)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "c").iterdir()} == before
    assert tokens_of(again.train) == tokens_of(first.train)
    assert again.fingerprint == first.fingerprint
    assert isinstance(again.train.entry.arrays["sample_index"].base, np.ndarray)


def test_the_default_folder_is_beside_the_data(corpus):
    build(config_of(data_path=[corpus], split="9,1,0"))
    assert len(entries(Path(corpus).parent / "index_cache")) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"training": {"seed": 1}},
        {"length": 17},
        {"split": "8,2,0"},
        {"sizes": {"train": 500}},
    ],
)
def test_what_decides_the_order_decides_the_entry(change, corpus, tmp_path):
    config = {"data_path": [corpus], "split": "9,1,0"}
    first = build(config_of(tmp_path / "c", **config), {"train": 50})
    count = len(entries(tmp_path / "c"))
    sizes = change.pop("sizes", {"train": 50})
    second = build(config_of(tmp_path / "c", **config | change), sizes)
    assert len(entries(tmp_path / "c")) == count + 1
    assert first.fingerprint != second.fingerprint


def test_more_steps_within_the_same_epochs_keep_the_order(corpus, tmp_path):
    config = config_of(tmp_path / "c", data_path=[corpus], split="9,1,0")
    first, second = build(config, {"train": 50}), build(config, {"train": 60})
    assert first.fingerprint == second.fingerprint
    assert tokens_of(first.train) == tokens_of(second.train)


def test_a_blend_may_be_lengthened_as_long_as_its_samples_come_in_the_same_order(corpus, tmp_path):
    """Where two lengths have one fingerprint, the longer begins as the shorter; other weights have another."""
    other = write_documents(tmp_path / "other", [[500 + d] * (20 + d % 30) for d in range(300)])
    config = config_of(tmp_path / "c", data_path=["0.3", corpus, "0.7", other], split="9,1,0")
    built = {size: build(config, {"train": size}).train for size in (40, 60, 100, 200, 500, 900, 2000)}
    equal = 0
    for short, long in itertools.combinations(built, 2):
        first, second = built[short], built[long]
        same = tokens_of(first)[:short] == tokens_of(second)[:short]
        assert same or first.fingerprint != second.fingerprint, (short, long)
        equal += first.fingerprint == second.fingerprint
    assert 3 <= equal < 21  # within the same epochs of each source, and not beyond
    cyclic = config_of(None, data_path=list(config.data.data_path), split="9,1,0", dataloader_type="cyclic")
    prints = {build(cyclic, {"train": size}).train.fingerprint for size in built}
    assert len(prints) == len(built)  # shuffled as a whole: no length begins as another does
    weights = config_of(tmp_path / "c", data_path=["0.4", corpus, "0.6", other], split="9,1,0")
    assert build(weights, {"train": 60}).fingerprint != built[60].fingerprint


@pytest.mark.parametrize(
    "data, says",
    [
        ({"split": "0,1,0"}, "--split 0,1,0 gives training nothing"),
        ({"split": "0,0,1"}, "--split 0,0,1 gives training nothing"),
        ({"per_split": {"valid": ["corpus"]}}, "--per-split-data-args-path .*p.json gives training nothing"),
    ],
)
def test_training_without_training_data_is_refused(corpus, tmp_path, data, says):
    if "per_split" in data:
        (tmp_path / "p.json").write_text(json.dumps({"valid": [corpus]}))
        config = config_of(tmp_path / "c", per_split_data_args_path=str(tmp_path / "p.json"))
    else:
        config = config_of(tmp_path / "c", data_path=[corpus], **data)
    with pytest.raises(ConfigError, match=says):
        build(config, {"train": 50, "valid": 0, "test": 0})
    build(config, {"train": 0, "valid": 2 if "valid" in str(data) else 0, "test": 0})


def test_changed_data_is_not_mistaken_for_the_old(tmp_path):
    """Same path, same sizes, same times, other lengths: the hash of the lengths tells."""
    prefix = write_documents(tmp_path / "set", [[1] * 40, [2] * 60, [3] * 50])
    config = config_of(tmp_path / "c", data_path=[prefix], split="1,0,0")
    states = [(path, path.stat()) for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"))]
    build(config)
    write_documents(tmp_path / "set", [[1] * 60, [2] * 40, [3] * 50])
    for path, state in states:
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    fresh = config_of(tmp_path / "fresh", data_path=[prefix], split="1,0,0")

    def starts(config):
        return build(config).train.entry.arrays["sample_index"].tolist()

    wanted = starts(fresh)
    trusted = replace(config, data=replace(config.data, dataloader_fast_cache_load=True))
    assert starts(trusted) != wanted  # the control: without the hash it would be wrong
    assert starts(config) == wanted
    assert starts(trusted) == wanted  # the entry was replaced


def test_a_damaged_entry_is_built_again(corpus, tmp_path):
    config = config_of(tmp_path / "c", data_path=[corpus], split="1,0,0")
    wanted = tokens_of(build(config).train)
    (entry,) = (tmp_path / "c").iterdir()
    whole = entry.read_bytes()
    for damaged in (b"", whole[:20], whole[:-1], b"garbage" * 1000, whole[:8] + b"\xff" * 8 + whole[16:]):
        entry.write_bytes(damaged)
        assert tokens_of(build(config).train) == wanted
        assert entry.read_bytes() == whole


@pytest.fixture
def machine_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    return tmp_path / "temporary" / f"megatron_lite_index_{os.getuid()}"


def test_a_folder_that_cannot_be_written_is_tolerated(corpus, tmp_path, machine_folder):
    """/proc refuses new files even to root. The arrays go to a private folder of the machine."""
    config = config_of("/proc", data_path=[corpus], split="1,0,0")
    wanted = tokens_of(build(config_of(tmp_path / "c", data_path=[corpus], split="1,0,0")).train)
    said = []
    first = build(config, say=said.append)
    assert tokens_of(first.train) == wanted
    assert any(
        "the index cannot be stored in /proc (" in line and str(machine_folder) in line for line in said
    )
    assert len(entries(machine_folder)) == 1
    assert stat.S_IMODE(machine_folder.stat().st_mode) == 0o700
    reader = build(config, is_builder=False)
    assert reader.train.entry.path.parent == machine_folder
    assert tokens_of(reader.train) == wanted


def test_nowhere_to_write_is_tolerated_too(corpus, tmp_path, machine_folder):
    machine_folder.symlink_to(tmp_path)  # a folder somebody else prepared is not used
    config, said = config_of("/proc", data_path=[corpus], split="1,0,0"), []
    dataset = build(config, say=said.append).train
    assert dataset.entry.path is None
    assert any(
        "the index cannot be stored" in line and "every process holds its own" in line for line in said
    )
    assert tokens_of(dataset) == tokens_of(
        build(config_of(tmp_path / "c", data_path=[corpus], split="1,0,0")).train
    )


def test_a_cache_path_that_cannot_be_made_is_refused(corpus):
    with pytest.raises(
        ConfigError, match="--data-cache-path /proc/index cannot be made: .*, wanted a folder"
    ):
        build(config_of("/proc/index", data_path=[corpus], split="1,0,0"))


def test_an_entry_in_a_read_only_folder_is_used(corpus, tmp_path, machine_folder):
    config = config_of(tmp_path / "c", data_path=[corpus], split="1,0,0")
    build(config)
    (tmp_path / "c").chmod(0o500)
    assert build(config).train.entry.path.parent == tmp_path / "c"
    assert not machine_folder.exists()


def _rank(rank, config, barrier, results):
    dataset = build(config, is_builder=rank == 0, barrier=barrier.wait).train
    results.put((rank, os.getpid(), dataset.entry.path is not None, tokens_of(dataset)))


def test_one_process_builds_the_others_read(corpus, tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    config = config_of(
        tmp_path / "c", data_path=["0.5", corpus, "0.5", str(GOLDEN / "ds_multi")], vocab_size=70_000
    )
    processes = [context.Process(target=_rank, args=(rank, config, barrier, results)) for rank in range(3)]
    for process in processes:
        process.start()
    got = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(timeout=60)
    assert all(from_file for _, _, from_file, _ in got)
    assert got[0][3] == got[1][3] == got[2][3]
    assert not list((tmp_path / "c").glob("*.tmp-*"))


# --- other flags


def test_too_many_files_is_one_sentence(tmp_path):
    prefixes = [write_documents(tmp_path / str(k), [[1] * 40]) for k in range(40)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len([*Path("/proc/self/fd").iterdir()]) + 50, hard))
    try:
        with pytest.raises(
            ConfigError, match=r"too many open files after \d+ sources: raise the limit \(ulimit -n\)"
        ):
            build(config_of(tmp_path / "c", data_path=prefixes, split="1,0,0"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_counts_are_compared(corpus, tmp_path):
    path = tmp_path / "counts.json"
    config = config_of(tmp_path / "c", data_path=[corpus], per_dataset_sequences_path=str(path))
    for good in ([100, 100], [100, 101]):  # documents, or boundaries as Megatron-core writes
        path.write_text(json.dumps({corpus: good}))
        build(config)
    path.write_text(json.dumps({corpus: [99, 100]}))
    with pytest.raises(ConfigError, match=r"corpus has \[99, 100\] .*, wanted \[100, 100\]"):
        build(config)
    path.write_text(json.dumps({"other": [1, 1]}))
    with pytest.raises(ConfigError, match="does not name .*corpus"):
        build(config)
    path.write_text("[]")
    with pytest.raises(ConfigError, match="is not JSON as wanted"):
        build(config)


def test_deferred_maps_are_made_on_first_use(corpus, tmp_path):
    config = config_of(
        tmp_path / "c", data_path=[corpus], split="1,0,0", dataloader_defer_npy_index_mmap=True
    )
    build(config)
    dataset = build(config).train
    assert "arrays" not in vars(dataset.entry)
    dataset[0]
    assert "arrays" in vars(dataset.entry)


@pytest.mark.parametrize("vocab_size, eod", [(50, 7), (50_000, 49_999), (2, 0)])
def test_mock_data(vocab_size, eod, machine_folder):
    config = config_of(mock_data=True, vocab_size=vocab_size, length=512, reset_position_ids=True)
    datasets = build_datasets(config, SimpleNamespace(eod=eod), {"train": 100, "valid": 10, "test": 10})
    sample = datasets.train[0]
    assert len(datasets.train) >= 100
    assert list(datasets.valid) == ["valid"]
    for i in range(50):
        sample = datasets.train[i]
        assert 0 <= sample["tokens"].min() <= sample["tokens"].max() < vocab_size
        assert (sample["tokens"][1:] == sample["labels"][:-1]).all()
    again = build_datasets(config, SimpleNamespace(eod=eod), {"train": 100})
    assert again.train[3]["tokens"].tolist() == datasets.train[3]["tokens"].tolist()
    ends = np.concatenate([datasets.train[i]["tokens"] for i in range(100)]) == eod
    if vocab_size > 2:
        assert 5 < ends.sum() < 200  # documents of 2,048 tokens on average, 51,200 tokens
