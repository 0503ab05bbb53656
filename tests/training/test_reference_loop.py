"""A GPT-3-style and a Llama-style launch script, shrunk, for 20 steps: losses of a hand-written transformers loop."""

import math

import pytest
import torch
import torch.nn.functional as F

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.data.build import build_datasets, sample_counts
from megatron_lite.data.loader import Loader
from megatron_lite.data.tokenizer import build_tokenizer
from megatron_lite.distributed.environment import Environment
from tests.hugging_face.models import build
from tests.runs import VOCAB, train, training_steps, write_data
from tools import hf_import

STEPS, BATCH, PEAK, FLOOR = 20, 8, 5e-3, 5e-4

# Flags as public scripts have them, sizes apart.
GPT3 = """
    --use-mcore-models --num-layers 2 --hidden-size 32 --ffn-hidden-size 80 --num-attention-heads 4 --seq-length 16
    --max-position-embeddings 64 --attention-backend auto --norm-epsilon 2e-5
    --micro-batch-size 1 --global-batch-size 8 --train-iters 20 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006 --clip-grad 1.0 --lr 5.0e-3 --lr-decay-style cosine --min-lr 5.0e-4
    --lr-warmup-fraction .25 --lr-decay-iters 16 --attention-dropout 0.0 --hidden-dropout 0.0
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
    --split 90,5,5 --log-interval 1 --eval-iters 0 --transformer-impl transformer_engine --no-masked-softmax-fusion
"""
LLAMA = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --kv-channels 8 --seq-length 16 --max-position-embeddings 64 --position-embedding-type rope
    --use-rotary-position-embeddings --rotary-base 500 --rotary-percent 1.0 --attention-dropout 0.0
    --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --normalization RMSNorm --norm-epsilon 2e-5
    --disable-bias-linear --untie-embeddings-and-output-weights --micro-batch-size 2 --global-batch-size 8
    --train-samples 160 --lr-decay-samples 128 --lr-warmup-samples 32 --lr 5e-3 --min-lr 5e-4 --lr-decay-style cosine
    --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --use-flash-attn --no-bias-swiglu-fusion
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --log-interval 1 --eval-iters 0
    --split 90,5,5 --distributed-backend gloo
"""
OURS = (
    "--tokenizer-type NullTokenizer --num-workers 0 --distributed-timeout-minutes 2 --finetune --device cpu"
)


def learning_rate(step):
    """Megatron's cosine with warm-up, in steps: 4 of warm-up, 16 in all, the floor from then on."""
    if step <= 4:
        return PEAK * step / 4
    if step > 16:
        return FLOOR
    return FLOOR + 0.5 * (math.cos(math.pi * (step - 4) / 12) + 1) * (PEAK - FLOOR)


def reference_losses(model, argv, world):
    """The same batches; the rest is transformers, torch and the formula above."""
    config = parse_arguments(argv, Environment(world_size=world))
    tokenizer = build_tokenizer(config.data, config.model.vocab_size)
    config = with_vocabulary(config, tokenizer.vocab_size)
    loader = Loader(build_datasets(config, tokenizer, sample_counts(config)).train, config, 0, 1, 0)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(STEPS):
        batch = loader.next_batch(BATCH)
        loss = F.cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.step()
        losses.append(loss.item())
    loader.close()
    return losses


@pytest.mark.parametrize(
    ("script", "family", "world"), [(GPT3, "gpt2-tied", 4), (LLAMA, "llama-gqa-untied", 2)]
)
def test_twenty_steps(script, family, world, tmp_path):
    theirs = build(family, vocab_size=VOCAB + 1)
    theirs.save_pretrained(tmp_path / "hf")
    hf_import.main(["--hf-model", str(tmp_path / "hf"), "--save", str(tmp_path / "start")])
    argv = [*script.split(), *OURS.split(), "--vocab-size", str(VOCAB), "--data-path", write_data(tmp_path)]
    argv += ["--load", str(tmp_path / "start"), "--metrics-file", str(tmp_path / "metrics.jsonl")]
    train(world, argv, timeout=150)
    steps = training_steps(tmp_path / "metrics.jsonl")
    assert [step[2] for step in steps.values()] == pytest.approx(
        [learning_rate(n) for n in range(1, STEPS + 1)]
    )
    seen = [step[0] for step in steps.values()]
    assert seen == pytest.approx(reference_losses(theirs.train(), argv, world), abs=1e-4)
    assert seen[-1] < seen[0] - 0.3
