"""Samples against a second, slow reading of Megatron-core's rules, written from their description in plain loops.

The golden files are few; this reaches the cases between them: several sequences a document, empty documents, many
epochs with and without a last one apart, every split, blends of every kind.
"""

import math
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.config import (
    Config,
    ConfigError,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    TrainingConfig,
)
from megatron_lite.data.build import build_datasets
from tests.pairs import write_documents

SPLITS = ("train", "valid", "test")


def reference_rows(sequences, wanted, length, seed, keep_partial=False):
    """The text of each sample, length + 1 tokens, -1 behind the end."""
    tokens = sum(map(len, sequences))
    epochs = 1
    while wanted is not None and epochs * tokens < wanted * length + 1:
        epochs += 1
    apart = False
    if epochs > 1:
        before_last = ((epochs - 1) * tokens - 1) // length
        apart = wanted - before_last < int(0.80 * ((tokens - 1) // length))
    random = np.random.RandomState(seed)
    parts = [epochs - 1, 1] if apart else [epochs]
    order = []
    for count in parts:
        part = np.array([i for _ in range(count) for i in range(len(sequences))], dtype=np.int32)
        random.shuffle(part)
        order += part.tolist()
    stream = [token for i in order for token in sequences[i]]
    number = (len(stream) - 1) // length
    if keep_partial:
        number = math.ceil((len(stream) - 1) / length)
    rows = [stream[i * length : (i + 1) * length + 1] for i in range(number)]
    rows = [row + [-1] * (length + 1 - len(row)) for row in rows]
    pieces = [(0, before_last), (before_last, number)] if apart else [(0, number)]
    shuffled = []
    for first, stop in pieces:
        piece = np.arange(first, stop, dtype=np.uint32)
        random.shuffle(piece)
        shuffled += piece.tolist()
    return [rows[i] for i in shuffled]


def reference_blend(parts, weights, size):
    """Rows of a blend; size None or weights None: as the lengths say."""
    limits = None
    if weights is None:
        weights = [float(len(part)) for part in parts]
        limits = [len(part) for part in parts]
        size = sum(limits) if size is None else min(size, sum(limits))
        limits = limits if size == sum(limits) else None
    for _ in range(
        2
    ):  # Megatron-core does it in its configuration and once more when it builds: a tie may turn on it
        weights = np.array(weights) / np.sum(weights)
    taken, rows = [0] * len(parts), []
    for i in range(size):
        lag = [
            weight * max(i, 1) - count if limits is None or count < limits[k] else -math.inf
            for k, (weight, count) in enumerate(zip(weights, taken))
        ]
        source = lag.index(max(lag))
        rows.append(parts[source][taken[source]])
        taken[source] += 1
    return rows


def cut(sequences, split):
    total, ends = sum(split), [0.0]
    for weight in split:
        ends.append(ends[-1] + weight / total)
    return [sequences[round(a * len(sequences)) : round(b * len(sequences))] for a, b in zip(ends, ends[1:])]


def rows_of(dataset):
    samples = [dataset[i] for i in range(len(dataset))]
    labels = [sample["labels"] for sample in samples]
    return [
        [int(sample["tokens"][0]), *np.where(label == -100, -1, label).tolist()]
        for sample, label in zip(samples, labels)
    ]


corpora = st.lists(
    st.lists(st.lists(st.integers(0, 999), max_size=12), min_size=0, max_size=3), min_size=4, max_size=25
)


@settings(max_examples=80)
@given(
    data=st.lists(st.tuples(corpora, st.integers(1, 9)), min_size=1, max_size=3),
    weighted=st.booleans(),
    split=st.sampled_from([(1, 0, 0), (90, 8, 2), (5, 3, 2)]),
    length=st.integers(1, 12),
    wanted=st.tuples(st.integers(1, 120), st.integers(1, 20), st.integers(1, 20)),
    seed=st.integers(0, 2**32 - 1),
    whole=st.booleans(),
)
def test_any_corpus(tmp_path_factory, data, weighted, split, length, wanted, seed, whole):
    folder = tmp_path_factory.mktemp("corpora")
    prefixes, corpora_here, weights = [], [], []
    for k, (documents, weight) in enumerate(data):
        prefixes.append(str(folder / str(k)))
        weights.append(float(weight))
        write_documents(prefixes[-1], documents, "int32", nested=True)
        corpora_here.append([sequence for sequences in documents for sequence in sequences])
    words = [w for pair in zip(map(str, weights), prefixes) for w in pair] if weighted else prefixes
    config = Config(
        model=ModelConfig(vocab_size=1000),
        data=DataConfig(
            seq_length=length,
            data_path=tuple(words),
            split=",".join(map(str, split)),
            data_cache_path=str(folder / "c"),
        ),
        training=TrainingConfig(seed=seed),
        evaluation=EvaluationConfig(full_validation=whole),
    )
    sizes = dict(zip(SPLITS, wanted))
    if whole:
        sizes |= {"valid": None, "test": None}
    parts = [cut(sequences, split) for sequences in corpora_here]
    used = [k for k in range(3) if split[k]]
    # A partial sample needs a token and a label, a whole one all its tokens.
    needed = [2 if whole and k else length + 1 for k in range(3)]
    if any(sum(map(len, part[k])) < needed[k] for part in parts for k in used):
        try:
            build_datasets(config, SimpleNamespace(eod=0), sizes)
        except ConfigError as error:
            assert "split of" in str(error)
            return
        raise AssertionError("too few tokens were not refused")
    datasets = build_datasets(config, SimpleNamespace(eod=0), sizes)
    for k in used:
        name, size = SPLITS[k], sizes[SPLITS[k]]
        dataset = datasets.train if name == "train" else getattr(datasets, name)[name]
        keep = whole and k > 0
        if len(parts) == 1 and not weighted:
            reference = reference_rows(parts[0][k], size, length, seed, keep)
        elif weighted and size is not None:
            shares = [math.ceil(size * weight) for weight in (np.array(weights) / np.sum(weights)).tolist()]
            asked = [math.ceil(share * 1.005) for share in shares]
            made = [reference_rows(part[k], ask, length, seed, keep) for part, ask in zip(parts, asked)]
            reference = reference_blend(made, weights, sum(shares))
        else:
            made = [reference_rows(part[k], None, length, seed, keep) for part in parts]
            reference = reference_blend(made, None, size)
        assert rows_of(dataset) == reference


def test_a_tie_falls_as_in_megatron_core():
    """Weights 6, 4, 4, normalised once, would give 0 1 2 0 2 1 ...; golden values of megatron-core's builder."""
    parts = [[(source, i) for i in range(10)] for source in range(3)]
    assert [row[0] for row in reference_blend(parts, [6.0, 4.0, 4.0], 10)] == [0, 1, 2, 0, 1, 2, 0, 1, 0, 2]
