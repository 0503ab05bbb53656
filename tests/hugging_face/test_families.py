"""Every family against transformers: logits, loss, gradients, and the weights back, bit by bit."""

import json

import pytest
import torch
from safetensors.torch import load_file

from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.hugging_face.model_config_json import choose_architecture, model_config_json
from megatron_lite.hugging_face.weights import our_shapes, to_ours, to_theirs
from megatron_lite.model.gpt import GPTChunk
from tests.hugging_face.models import CASES, VOCAB, random_tokens, saved


def our_model(folder):
    """GPTChunk with the weights of a folder."""
    chunk = GPTChunk(folder.model, range(folder.model.num_layers))
    parameters = dict(chunk.named_global_parameters())
    shapes = our_shapes(folder.model)
    for entry in folder.maps:
        for name, tensor in to_ours(entry, folder.read(entry.theirs), shapes, folder.model):
            parameters.pop(name).data.copy_(tensor)
    assert not parameters
    return chunk.eval()


def their_gradients_as_ours(theirs, folder):
    shapes = our_shapes(folder.model)
    named = dict(theirs.named_parameters())
    return {
        name: gradient
        for entry in folder.maps
        for name, gradient in to_ours(entry, named[entry.theirs].grad, shapes, folder.model)
    }


@pytest.mark.parametrize("name", CASES)
def test_logits_loss_gradient_and_round_trip(name, tmp_path):
    theirs = saved(name, tmp_path)
    folder = ModelFolder(tmp_path, vocabulary_multiple=16)
    assert folder.model.padded_vocab_size == 64 and folder.model.vocab_size == VOCAB
    ours = our_model(folder)
    tokens = random_tokens()
    with torch.no_grad():
        expected = theirs(tokens).logits
        seen = ours(tokens)[..., :VOCAB]
    assert expected.std() > 0.1
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)

    loss = theirs(tokens, labels=tokens).loss
    loss.backward()
    labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
    our_loss = ours(tokens, labels=labels).squeeze() / (labels != -100).sum()
    our_loss.backward()
    torch.testing.assert_close(our_loss, loss, rtol=1e-5, atol=1e-5)
    gradients = dict(ours.named_global_parameters())
    for key, gradient in their_gradients_as_ours(theirs, folder).items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(gradients[key].grad, gradient, rtol=1e-3, atol=1e-5 * max(scale, 1.0))

    stored = load_file(tmp_path / "model.safetensors")
    for entry in folder.maps:
        back = to_theirs(entry, [gradients[part].data for part in entry.ours], folder.model)
        assert torch.equal(back, stored.pop(entry.theirs))
    assert not stored


@pytest.mark.parametrize("name", CASES)
def test_config_there_and_back(name, tmp_path):
    """config.json written from our flags gives transformers the same model, and us the same flags."""
    theirs = saved(name, tmp_path)
    before = ModelFolder(tmp_path)
    architecture = choose_architecture(before.model)
    if "no-window" not in name:  # without a window Mistral computes what Llama computes
        assert architecture == theirs.config.architectures[0]
    content = model_config_json(before.model, architecture, "float32", {"bos": 1, "eos": 2})
    (tmp_path / "config.json").write_text(json.dumps(content))
    after = ModelFolder(tmp_path)
    assert after.model == before.model
    again = type(theirs).from_pretrained(tmp_path) if architecture == theirs.config.architectures[0] else None
    if again is not None:
        tokens = random_tokens()
        torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=1e-4, atol=1e-5)
