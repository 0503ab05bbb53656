"""A public model trained on with the real program, in a pipeline and sharded, against a plain transformers loop."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

import pretrain_gpt
from megatron_lite.arguments.parse import parse_or_exit
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.checkpoint import stored_config
from megatron_lite.data.build import build_datasets, sample_counts
from megatron_lite.data.loader import Loader
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed.environment import Environment
from tests.hugging_face.models import build, random_tokens
from tests.ranks import run_ranks
from tests.runs import VOCAB, training_steps, write_data
from tools import hf_export, hf_import

STEPS, RATE, DECAY, BATCH = 10, 3e-3, 0.1, 8
FLAGS = f"""
    --use-checkpoint-args --seq-length 16 --micro-batch-size 1 --global-batch-size {BATCH} --train-iters {STEPS}
    --lr {RATE} --min-lr {RATE} --lr-decay-style constant --weight-decay {DECAY} --log-interval 1 --num-workers 0
    --tokenizer-type NullTokenizer --split 90,5,5 --eval-iters 0 --distributed-timeout-minutes 2 --device cpu
    --save-interval {STEPS} --attention-dropout 0 --hidden-dropout 0
"""


def pretrain(argv):
    environment = Environment.read()
    return pretrain_gpt.pretrain(parse_or_exit(argv, environment, stored_config), environment, started=0.0)


def their_losses(model, argv):
    """The same batches from the loader; everything else is transformers and torch."""
    config = parse_or_exit(argv, Environment(), stored_config)
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    config = with_vocabulary(config, tokenizer.vocab_size)
    datasets = build_datasets(config, tokenizer, sample_counts(config))
    loader = Loader(datasets.train, config, 0, 1, 0)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.999), eps=1e-8)
    losses = []
    for _ in range(STEPS):
        batch = loader.next_batch(BATCH)
        loss = F.cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    loader.close()
    return losses


@pytest.mark.parametrize(
    ("name", "world", "layout"),
    [
        ("qwen2-gqa-tied", 4, "--pipeline-model-parallel-size 2"),
        ("gpt2-untied", 2, ""),
    ],
)
def test_ten_steps_of_the_program(name, world, layout, tmp_path):
    ids = {"bos_token_id": 3, "eos_token_id": [0, 7]}  # no pad: transformers would not train its row
    theirs = build(name, vocab_size=VOCAB + 1, **ids)
    theirs.save_pretrained(tmp_path / "hf")
    hf_import.main(["--hf-model", str(tmp_path / "hf"), "--save", str(tmp_path / "ck")])
    argv = [*FLAGS.split(), "--load", str(tmp_path / "ck"), "--save", str(tmp_path / "out")]
    argv += ["--data-path", write_data(tmp_path), "--metrics-file", str(tmp_path / "metrics.jsonl")]
    run_ranks(pretrain, world, [*argv, *layout.split()], timeout=120)
    seen = [step[0] for step in training_steps(tmp_path / "metrics.jsonl").values()]
    expected = their_losses(theirs.train(), argv)
    assert seen == pytest.approx(expected, abs=1e-4)
    assert seen[-1] < seen[0] - 0.1

    hf_export.main(["--load", str(tmp_path / "out"), "--output", str(tmp_path / "trained")])
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    for said in (trained.config, trained.generation_config):  # a NullTokenizer knows no other ends of text
        assert {key: getattr(said, key) for key in ids} == ids
    # Not the weights: a bias of GPT-2's keys has no gradient but rounding, and Adam follows even that.
    tokens = random_tokens(vocab=VOCAB + 1)
    torch.testing.assert_close(trained(tokens).logits, theirs(tokens).logits, rtol=1e-3, atol=2e-3)
