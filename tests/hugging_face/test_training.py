"""An imported model trained on: the same losses as a plain transformers loop with torch's AdamW."""

import pytest
import torch

from megatron_lite.config import OptimizerConfig
from megatron_lite.hugging_face.folder import ModelFolder
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.training.optimizer import build_optimizer, set_schedule
from tests.hugging_face.models import random_tokens, saved

STEPS, RATE, DECAY = 10, 3e-3, 0.1


def their_losses(model):
    decays = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for step in range(STEPS):
        tokens = random_tokens(seed=step)
        loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def our_losses(folder):
    chunk = GPTChunk(folder.model, range(folder.model.num_layers))
    weights = dict(folder.our_tensors())
    for name, parameter in chunk.named_global_parameters():
        parameter.data.copy_(weights[name])
    optimizer = build_optimizer([chunk], OptimizerConfig(lr=RATE))
    losses = []
    for step in range(STEPS):
        tokens = random_tokens(seed=step)
        labels = torch.cat((tokens[:, 1:], torch.full((2, 1), -100)), dim=1)
        loss = chunk(tokens, labels=labels).squeeze() / (labels != -100).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(chunk.parameters(), 1.0)
        set_schedule(optimizer, lambda decoupled: RATE, DECAY)
        optimizer.step()
        losses.append(loss.item())
    return losses


NAMES = ["llama-gqa-tied", "mistral-gqa-untied", "qwen2-mha-tied", "qwen3-gqa-untied", "gpt2-tied"]


@pytest.mark.parametrize("name", NAMES)
def test_ten_steps(name, tmp_path):
    theirs = saved(name, tmp_path).train()
    expected = their_losses(theirs)
    seen = our_losses(ModelFolder(tmp_path, vocabulary_multiple=16))
    assert seen == pytest.approx(expected, abs=1e-4)
    assert abs(expected[0] - expected[-1]) > 0.05, "the steps have to change something"
