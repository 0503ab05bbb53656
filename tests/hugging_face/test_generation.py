"""Generation against transformers: greedy token by token, and what is drawn from."""

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from megatron_lite.config import ConfigError
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.model.generation import Sampling, generate, next_token_probabilities
from megatron_lite.model.gpt import load_chunk
from tests.hugging_face.models import saved


def ours(path):
    folder = ModelFolder(path)
    return load_chunk(folder.model, range(folder.model.num_layers), dict(folder.our_tensors()).__getitem__)


@pytest.mark.parametrize(
    "name",
    [
        "llama3-scaling-gqa-untied",
        "mistral-gqa-tied",
        "qwen2-window-mha-untied",
        "qwen3-gqa-tied",
        "gpt2-tied",
    ],
)
def test_greedy_is_what_transformers_generates(name, tmp_path):
    """Past the sliding window, which is 7 and 5 tokens here; the cache holds what the window needs."""
    theirs = saved(name, tmp_path)
    model = ours(tmp_path)
    for prompt in ([3], [5, 9, 2, 44, 17, 8, 30, 12, 1, 0]):
        expected = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=24,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        assert generate(model, prompt, 24, Sampling()) == expected[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    saved("gpt2-tied", folder)
    return ours(folder)


def test_the_cache_changes_nothing(model):
    """Against the whole text run anew for each token."""
    new = generate(model, [4, 8], 12, Sampling())
    for count in range(12):
        logits = model(torch.tensor([[4, 8, *new[:count]]]))[0, -1, : model.config.vocab_size]
        assert int(logits.argmax()) == new[count]


@pytest.mark.parametrize(
    "sampling", [Sampling(0.7), Sampling(1.3, 5), Sampling(1.0, None, 0.6), Sampling(0.9, 20, 0.8)]
)
def test_probabilities_are_those_of_transformers(sampling):
    generator = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = 3 * torch.randn(1, 61, generator=generator)
        expected = TemperatureLogitsWarper(sampling.temperature)(None, logits)
        if sampling.top_k:
            expected = TopKLogitsWarper(sampling.top_k)(None, expected)
        if sampling.top_p:
            expected = TopPLogitsWarper(sampling.top_p)(None, expected)
        seen = next_token_probabilities(logits[0], sampling)
        torch.testing.assert_close(seen, expected.softmax(-1)[0])


def test_draws_follow_the_seed_and_the_probabilities(model):
    def draw(seed, count=8):
        return generate(model, [1], count, Sampling(1.0), torch.Generator().manual_seed(seed))

    assert draw(1) == draw(1)
    assert len({tuple(draw(seed)) for seed in range(8)}) > 4
    expected = next_token_probabilities(model(torch.tensor([[1]]))[0, -1, :61], Sampling(1.0))
    counts = torch.zeros(61)
    for seed in range(250):
        counts[draw(seed, 1)[0]] += 1
    assert (counts / 250 - expected).abs().max() < 0.12
    assert generate(model, [1], 8, Sampling(1.0, 1), torch.Generator()) == generate(model, [1], 8, Sampling())


def test_stops_and_refusals(model):
    new = generate(model, [1, 2], 10, Sampling())
    assert generate(model, [1, 2], 10, Sampling(), stop={new[4]}) == new[: new.index(new[4])]
    for prompt, count, words in (
        ([], 1, "empty"),
        ([61], 1, "token 61"),
        ([1] * 60, 5, "the 64 that the model"),
    ):
        with pytest.raises(ConfigError, match=words):
            generate(model, prompt, count, Sampling())
