"""Every index array and every sample of the golden files, which Megatron-core made."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_lite.config import Config, DataConfig, EvaluationConfig, ModelConfig, TrainingConfig
from megatron_lite.data.blended_dataset import BlendedDataset
from megatron_lite.data.blends import normalize, parse_blend, parse_split, split_bounds, split_range
from megatron_lite.data.build import build_datasets
from megatron_lite.data.gpt_dataset import GPTDataset, Part, build_entry
from megatron_lite.data.index_cache import IndexCache
from megatron_lite.data.indexed_dataset import IndexedDataset
from megatron_lite.data.samples import SampleOptions

GOLDEN = Path(__file__).parent.parent / "golden"
STORED = json.loads((GOLDEN / "golden.json").read_text())
CASES = STORED["cases"]
TOKENIZER = SimpleNamespace(eod=STORED["EOD"])


def config_of(case, cache, **data):
    asked = case["config"]
    prefixes, weights = case["blend"]
    paths = [str(GOLDEN / prefix) for prefix in prefixes]
    words = paths if weights is None else [w for pair in zip(map(str, weights), paths) for w in pair]
    return Config(
        model=ModelConfig(vocab_size=100_000),
        data=DataConfig(
            seq_length=asked["sequence_length"],
            data_path=tuple(words),
            split=asked["split"],
            data_cache_path=str(cache),
            reset_position_ids=asked["reset_position_ids"],
            reset_attention_mask=asked["reset_attention_mask"],
            eod_mask_loss=asked["eod_mask_loss"],
            **data,
        ),
        training=TrainingConfig(seed=asked["random_seed"]),
        evaluation=EvaluationConfig(full_validation=not asked["drop_last_partial_validation_sequence"]),
    )


def built(case, cache, **data):
    """{split: dataset} by way of the flags, or piece by piece where no flag says it (no extra token)."""
    sizes = dict(zip(("train", "valid", "test"), case["sizes_train_valid_test"]))
    if case["config"]["add_extra_token_to_sequence"]:
        datasets = build_datasets(config_of(case, cache, **data), TOKENIZER, sizes)
        return {"train": datasets.train, "valid": datasets.valid.get("valid")}
    asked = case["config"]
    source = IndexedDataset(GOLDEN / case["blend"][0][0], mmap=not data.get("no_mmap_bin_files", False))
    options = SampleOptions(asked["sequence_length"], STORED["EOD"], extra_token=False)
    bounds = split_bounds(parse_split(asked["split"]))
    datasets = {}
    for split in ("train", "valid"):
        part = Part(*split_range(bounds[split], len(source)), sizes[split])
        entry = build_entry(source, part, options, asked["random_seed"], IndexCache(cache), store=True)
        datasets[split] = GPTDataset(source, entry, options, split)
    return datasets


def same(ours, golden):
    assert ours.shape == golden.shape
    np.testing.assert_array_equal(ours, golden)


def check_samples(dataset, stored, split, case):
    samples = [dataset[i] for i in range(len(dataset))]
    tokens = np.stack([sample["tokens"] for sample in samples])
    labels = np.stack([sample["labels"] for sample in samples])
    assert tokens.dtype == labels.dtype == np.int64
    if f"{split}/text" in stored:
        golden_tokens, golden_labels = stored[f"{split}/text"][:, :-1], stored[f"{split}/text"][:, 1:]
    else:
        golden_tokens, golden_labels = stored[f"{split}/tokens"], stored[f"{split}/labels"]
    mask = np.ones(golden_labels.shape, dtype=bool)
    if f"{split}/loss_mask" in stored:
        mask = np.unpackbits(stored[f"{split}/loss_mask"], axis=1).astype(bool)
    same(labels != -100, mask)
    same(labels[mask], golden_labels[mask])
    # Where Megatron pads, its input is the pad token (-1) made 0 on the way to the model.
    same(tokens, np.maximum(golden_tokens, 0))
    assert ("position_ids" in samples[0]) == case["config"]["reset_position_ids"]
    if f"{split}/position_ids" in stored:
        same(np.stack([sample["position_ids"] for sample in samples]), stored[f"{split}/position_ids"])
    if f"{split}/attention_mask_first8" in stored:
        forbidden = np.unpackbits(stored[f"{split}/attention_mask_first8"], axis=-1).astype(bool)
        for sample, golden in zip(samples, forbidden):
            documents = sample["document_ids"]
            seen = (documents[:, None] == documents[None, :]) & np.tri(len(documents), dtype=bool)
            same(~seen, golden)


@pytest.mark.parametrize("no_mmap", [False, True], ids=["mmap", "pread"])
@pytest.mark.parametrize("name", CASES)
def test_golden(name, no_mmap, tmp_path):
    case, stored = CASES[name], np.load(GOLDEN / f"{name}.npz")
    for _ in range(2):  # built, then from the cache
        datasets = built(case, tmp_path, no_mmap_bin_files=no_mmap)
        for split, dataset in datasets.items():
            about = case["splits"][split]
            assert (dataset is None) == (about is None)
            if dataset is None:
                continue
            assert len(dataset) == about["len"]
            parts = dataset.sources if isinstance(dataset, BlendedDataset) else [dataset]
            assert len(parts) == len(about["mid"])
            for k, (part, mid) in enumerate(zip(parts, about["mid"])):
                assert len(part) == mid["len"]
                assert part.entry.about["tokens"] == mid["tokens_per_epoch"]
                assert part.entry.about["epochs"] == mid["num_epochs"]
                assert part.entry.about["sequences"] == mid["document_range"]
                for key, array in part.entry.arrays.items():
                    same(array, stored[f"{split}/{k}/{key}"])
            if isinstance(dataset, BlendedDataset):
                for key, array in dataset.entry.arrays.items():
                    same(array, stored[f"{split}/{key}"])
            check_samples(dataset, stored, split, case)
        assert all(part.entry.path is not None for part in parts)


def test_all_golden_files_are_tested():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == set(CASES)


def test_another_seed_gives_other_samples(tmp_path):
    """The control: the comparison above can fail."""
    case = CASES["i32_1epoch"]
    config = config_of(case, tmp_path)
    config = replace(config, training=TrainingConfig(seed=1235))
    datasets = build_datasets(config, TOKENIZER, {"train": 288})
    with pytest.raises(AssertionError):
        check_samples(datasets.train, np.load(GOLDEN / "i32_1epoch.npz"), "train", case)


@pytest.mark.parametrize("name", ["ds_i32", "ds_u16", "ds_multi"])
def test_golden_files_open(name):
    stored = STORED[name]
    dataset = IndexedDataset(GOLDEN / name)
    assert (len(dataset), dataset.num_documents) == (stored["sequences"], stored["documents"])
    assert (dataset.num_tokens, dataset.dtype.name) == (stored["tokens"], stored["dtype"])


@pytest.mark.parametrize("words", STORED["get_blend_from_list"])
def test_golden_blend_words(words):
    prefixes, weights = STORED["get_blend_from_list"][words]
    blend = parse_blend(json.loads(words), "--data-path")
    assert list(blend.prefixes) == prefixes
    assert blend.weights == (None if weights is None else tuple(normalize(weights)))


@pytest.mark.parametrize("name", CASES)
def test_golden_split_bounds(name):
    case = CASES[name]
    bounds = split_bounds(parse_split(case["config"]["split"]))
    golden = [None if pair is None else tuple(pair) for pair in case["split_matrix"]]
    assert [bounds[name] for name in ("train", "valid", "test")] == golden
