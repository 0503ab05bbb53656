"""Train a tiny model in some layout, and the same model in a bare one-process loop: the two sides of a parity test.

The bare side uses none of the code under test but the model: no mesh, pipeline, FSDP, clipping or loss code.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from megatron_lite.mesh import build_mesh
from megatron_lite.model.gpt import GPTChunk
from megatron_lite.parallel.parallelize import build_chunks
from megatron_lite.parallel.partition import plan_from_config, stages_of_rank
from megatron_lite.parallel.pipeline import Pipeline
from megatron_lite.training.gradients import clip_gradients, gradient_norm, scale_gradients
from megatron_lite.training.loss_scale import LossScale
from megatron_lite.training.optimizer import build_optimizer, set_schedule

VOCAB, SEQ_LENGTH, SEED = 59, 16, 1234
FULL_PRECISION = PrecisionConfig()
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


@dataclass
class Outcome:
    """Per step: loss per token, gradient norm before clipping; after the first step: gradients by global name.

    After the last step: the loss of the first batch, forward only.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    evaluation: float = 0.0


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
        optimizer=OptimizerConfig(optimizer=optimizer, lr=0.01, clip_grad=1.0, adam_beta2=0.95),
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


def my_part(batch: dict[str, torch.Tensor], config: Config, mesh) -> dict[str, torch.Tensor]:
    """Megatron's assignment: microbatch j gives data-parallel rank r the r-th run of micro_batch_size samples."""
    size, ranks = config.training.micro_batch_size, mesh.data_parallel_size
    pick = torch.arange(config.training.global_batch_size).view(-1, ranks, size)[:, mesh.data_parallel_rank]
    return {key: tensor[pick.flatten()] for key, tensor in batch.items()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor on every rank of its mesh, as a copy."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def set_up(config: Config, mesh) -> tuple[list[GPTChunk], Pipeline]:
    """My rank's chunks and the pipeline around them."""
    plans = plan_from_config(config)

    def build(stage):
        return GPTChunk(config.model, stage.layers, stage.has_embedding, stage.has_lm_head)

    chunks = build_chunks(config, stages_of_rank(plans, mesh.rank("pp")), mesh, build)
    return chunks, Pipeline(config, plans, chunks, mesh)


def train_in_layout(config: Config, batches: list[dict[str, torch.Tensor]]) -> Outcome:
    """Run on every rank of the layout (a top-level function for run_ranks)."""
    torch.manual_seed(0)
    mesh = build_mesh(config, torch.device("cpu"))
    chunks, pipeline = set_up(config, mesh)
    optimizer = build_optimizer(chunks, config.optimizer)
    outcome = Outcome([], [], {})
    num_microbatches = config.training.global_batch_size // (
        config.training.micro_batch_size * mesh.data_parallel_size
    )
    for batch in batches:
        tokens = int((batch["labels"] != -100).sum())
        scale = LossScale.from_config(config.precision).scale
        loss_sum = pipeline.train_step(my_part(batch, config, mesh), num_microbatches, scale / tokens)
        scale_gradients(chunks, 1 / scale)
        outcome.losses.append(per_token(loss_sum, tokens, mesh))
        outcome.norms.append(gradient_norm(chunks, mesh).item())
        if not outcome.gradients:
            for chunk in chunks:
                for name, parameter in chunk.named_global_parameters():
                    outcome.gradients[name] = full(parameter.grad)
        clip_gradients(chunks, outcome.norms[-1], config.optimizer.clip_grad)
        set_schedule(optimizer, lambda decoupled: 0.01, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    pipeline.set_training(False)
    tokens = int((batches[0]["labels"] != -100).sum())
    loss_sum = pipeline.eval_step(my_part(batches[0], config, mesh), num_microbatches)
    outcome.evaluation = per_token(loss_sum, tokens, mesh)
    return outcome


def per_token(loss_sum: torch.Tensor, tokens: int, mesh) -> float:
    """The loss per token of the global batch, from each rank's own sum; the same on every rank."""
    dist.all_reduce(mesh.sum_over(loss_sum, "pp"), group=mesh.token_group)
    return loss_sum.item() / tokens


def initial_whole_model(config: Config) -> GPTChunk:
    """The whole model in one process with the initial weights by name."""
    model = GPTChunk(config.model, range(config.model.num_layers))
    with torch.no_grad():
        for name, parameter in model.named_global_parameters():
            rows = torch.arange(parameter.shape[0])
            parameter.copy_(model.initial_rows(name, tuple(parameter.shape), rows, config.training.seed))
    return model


def train_bare(config: Config, batches: list[dict[str, torch.Tensor]]) -> Outcome:
    """The judge: one process, plain autograd over the whole global batch, torch's own clip and AdamW."""
    model = initial_whole_model(config)
    optimizers = bare_optimizers(config, model)
    outcome = Outcome([], [], {})
    for batch in batches:
        loss = bare_loss(model, batch, config.precision)
        loss.backward()
        if not outcome.gradients:
            outcome.gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip_grad)
        outcome.losses.append(loss.item())
        outcome.norms.append(norm.item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        outcome.evaluation = bare_loss(model, batches[0], config.precision).item()
    return outcome


def bare_optimizers(config: Config, model: GPTChunk) -> list[torch.optim.Optimizer]:
    """torch's own AdamW for everything, or torch's own Muon for the blocks' matrices and AdamW for the rest."""
    muon = config.optimizer.optimizer == "muon"
    matrices = {
        n: p for n, p in model.named_parameters() if muon and n.startswith("layers.") and p.dim() == 2
    }
    rest = [p for n, p in model.named_parameters() if n not in matrices]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in rest if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizers = [torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))]
    if muon:
        optimizers.append(
            torch.optim.Muon(matrices.values(), lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers


def bare_loss(
    model: GPTChunk, batch: dict[str, torch.Tensor], precision: PrecisionConfig = FULL_PRECISION
) -> torch.Tensor:
    """The mean cross-entropy over the unmasked tokens of the whole batch, in fp32.

    In half precision the model computes with cast parameters, and their gradients come back in fp32.
    """
    dtype = torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32
    parameters = {name: parameter.to(dtype) for name, parameter in model.named_parameters()}
    extra = {key: t for key, t in batch.items() if key not in ("tokens", "labels")}
    logits = torch.func.functional_call(model, parameters, (batch["tokens"],), extra)
    logits = logits[..., : model.config.vocab_size].float()
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def assert_equal_outcomes(ranks: list[Outcome], judge: Outcome, tolerance: float = 1e-5) -> None:
    """Every rank's losses and norms, and every parameter's gradient, equal the judge's within the tolerance."""
    seen = {}
    for outcome in ranks:
        torch.testing.assert_close(outcome.losses, judge.losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(outcome.norms, judge.norms, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(outcome.evaluation, judge.evaluation, rtol=tolerance, atol=tolerance)
        seen.update(outcome.gradients)
    assert sorted(seen) == sorted(judge.gradients)
    largest = max(gradient.abs().max().item() for gradient in judge.gradients.values())
    for name, gradient in judge.gradients.items():
        # A gradient that is zero but for rounding (a key's bias) is held to what rounding leaves of the others.
        scale = max(gradient.abs().max().item(), 0.01 * largest)
        torch.testing.assert_close(
            seen[name],
            gradient,
            rtol=tolerance,
            atol=tolerance * scale,
            msg=lambda m, name=name: f"{name}: {m}",
        )
