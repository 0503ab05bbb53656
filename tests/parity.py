"""A tiny model, its batches and layouts for parity tests; both sides of the comparison are tools/verify_parity.py's."""

from dataclasses import replace

import torch
from torch.distributed.tensor import DTensor

from megatron_lite.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    TrainingConfig,
)
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.fsdp import compute_dtype
from megatron_lite.rehearsal.one_process import Outcome, mean_loss
from megatron_lite.rehearsal.parity import compare_with_one_process, report, run_layout
from megatron_lite.training.run import Run, build_run
from tools.verify_parity import FACTOR

VOCAB, SEQ_LENGTH, SEED = 59, 16, 1234
MODEL = ModelConfig(
    num_layers=8,
    hidden_size=32,
    ffn_hidden_size=48,
    num_attention_heads=4,
    group_query_attention=True,
    num_query_groups=2,
    kv_channels=8,
    max_position_embeddings=SEQ_LENGTH,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    hidden_dropout=0.0,
    attention_dropout=0.0,
    # Larger than usual: with 0.02 the gradients of so small a model drown in rounding.
    init_method_std=0.3,
    vocab_size=VOCAB,
    make_vocab_size_divisible_by=64,
    padded_vocab_size=64,
)


def make_config(
    pp=1,
    chunks=1,
    dp=1,
    microbatches=4,
    schedule=None,
    model=None,
    micro_batch_size=1,
    tp=1,
    cp=1,
    precision=None,
    optimizer="adam",
    **parallel,
) -> Config:
    """A resolved config of the tiny model for a layout; global batch = microbatches * micro_batch_size * dp.

    precision: None (fp32), "bf16" or "fp16" (loss scale 1024).
    """
    schedule = schedule or ("interleaved-1f1b" if chunks > 1 else "1f1b")
    return Config(
        model=replace(MODEL, **(model or {})),
        parallel=ParallelConfig(
            world_size=pp * dp * tp * cp,
            pipeline_model_parallel_size=pp,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            num_virtual_stages_per_pipeline_rank=chunks,
            pipeline_schedule=schedule,
            distributed_timeout_minutes=2,
            **parallel,
        ),
        precision=PrecisionConfig(
            bf16=precision == "bf16",
            fp16=precision == "fp16",
            loss_scale=1024.0 if precision == "fp16" else None,
        ),
        data=DataConfig(seq_length=SEQ_LENGTH),
        training=TrainingConfig(
            micro_batch_size=micro_batch_size,
            global_batch_size=microbatches * micro_batch_size * dp,
            train_iters=3,
            seed=SEED,
        ),
        optimizer=OptimizerConfig(
            optimizer=optimizer,
            lr=0.01,
            lr_decay_style="constant",
            weight_decay=0.1,
            clip_grad=1.0,
            adam_beta2=0.95,
        ),
    )


def make_batches(
    global_batch_size: int, steps: int = 3, documents: bool = False
) -> list[dict[str, torch.Tensor]]:
    """Random global batches; label -100 on an uneven number of tokens per sample, one sample wholly masked.

    documents: samples of several documents, with their document_ids and positions that restart in each.
    """
    generator = torch.Generator().manual_seed(7)
    batches = []
    for _ in range(steps):
        tokens = torch.randint(0, VOCAB, (global_batch_size, SEQ_LENGTH), generator=generator)
        labels = torch.randint(0, VOCAB, (global_batch_size, SEQ_LENGTH), generator=generator)
        kept = torch.rand(global_batch_size, 1, generator=generator)
        labels[torch.rand(labels.shape, generator=generator) > kept] = -100
        labels[-1] = -100
        batches.append({"tokens": tokens, "labels": labels})
        if documents:
            starts = torch.rand(tokens.shape, generator=generator) < 0.2
            starts[:, 0] = True
            positions = torch.arange(SEQ_LENGTH).expand_as(tokens)
            batches[-1]["document_ids"] = starts.cumsum(dim=1)
            batches[-1]["position_ids"] = positions - (positions * starts).cummax(dim=1).values
    return batches


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank of its mesh, as a copy."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def set_up(config: Config) -> Run:
    """My rank's part of a run, on the CPU."""
    return build_run(config, build_mesh(config, torch.device("cpu")))


def train_in_layout(config: Config, batches: list[dict[str, torch.Tensor]]) -> Outcome:
    """Run on every rank of the layout (for run_ranks): a step a batch, then the first evaluated."""
    torch.manual_seed(0)
    return run_layout(config, build_mesh(config, torch.device("cpu")), [*batches, batches[0]])


def per_token(loss_sum: torch.Tensor, tokens: int, mesh) -> float:
    """The loss per token of the global batch, from each rank's own sum; the same on every rank."""
    return mesh.sum_over(loss_sum, "pp", "dp_replicate", "dp_shard", "cp").item() / tokens


def bare_loss(model: GPTChunk, batch: dict[str, torch.Tensor], config: Config) -> torch.Tensor:
    """The mean cross-entropy over the unmasked tokens of the whole batch, by plain autograd."""
    return mean_loss(model, batch, config, torch.device("cpu"), compute_dtype(config.precision))


def assert_equals_one_process(
    ranks: list[Outcome], config: Config, batches: list[dict[str, torch.Tensor]], factor: float = FACTOR
) -> float:
    """Every rank's losses and norms, and every parameter's gradient, are as near to fp64 as one process's.

    Returns:
        The margin of the closest choice of a router.
    """
    gradients = {name: g for outcome in ranks for name, g in outcome.gradients.items()}
    for outcome in ranks[1:]:
        assert (outcome.losses, outcome.norms) == (ranks[0].losses, ranks[0].norms), (
            "ranks must agree to the bit"
        )
    whole = replace(ranks[0], gradients=gradients)
    rows, margin = compare_with_one_process(
        config, whole, [*batches, batches[0]], torch.device("cpu"), factor
    )
    assert not any(row.fails for row in rows), "\n" + report(rows, factor, margin)
    return margin
