"""Our side of a comparison: the baseline's sizes as flags, the program's own step, fed by hand."""

from collections.abc import Sequence
from itertools import cycle

import torch
import torch.distributed as dist
from torch import nn

from megatron_lite.arguments.parse import parse_arguments
from megatron_lite.arithmetic.vocabulary import with_vocabulary
from megatron_lite.config import Config
from megatron_lite.distributed.environment import Environment
from megatron_lite.distributed.mesh import build_mesh
from megatron_lite.hugging_face.model_config import choose_family, model_config_json
from megatron_lite.hugging_face.weights import tensor_maps, to_theirs
from megatron_lite.parallel.pipeline import Batch
from megatron_lite.training.metrics import StepResult
from megatron_lite.training.run import build_run
from tools.benchmarks import baseline_model as bare
from tools.benchmarks.baseline_model import Sizes
from tools.benchmarks.scripts import Job, Step, bare_model, loop


def run_flags(sizes: Sizes) -> list[str]:
    """The model, optimizer and loop of the baseline in the words of pretrain_gpt.py, but for data, batch and layout.

    One id less than the vocabulary: NullTokenizer adds its end of document.
    """
    mixture = f"--num-experts {sizes.experts} --moe-router-topk {sizes.chosen}" if sizes.experts else ""
    beta1, beta2 = bare.BETAS
    return f"""
        {mixture} --num-layers {sizes.layers} --hidden-size {sizes.hidden} --num-attention-heads {sizes.heads}
        --ffn-hidden-size {sizes.ffn} --seq-length {sizes.seq_length} --max-position-embeddings {sizes.seq_length}
        --vocab-size {sizes.vocabulary - 1} --make-vocab-size-divisible-by 1 --tokenizer-type NullTokenizer
        --micro-batch-size {sizes.micro_batch} --swiglu --normalization RMSNorm --norm-epsilon {bare.NORM_EPSILON}
        --position-embedding-type rope --rotary-base {bare.ROTARY_BASE:.0f} --disable-bias-linear
        --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0
        --lr {bare.LEARNING_RATE} --lr-decay-style constant --weight-decay {bare.WEIGHT_DECAY} --clip-grad {bare.CLIP}
        --adam-beta1 {beta1} --adam-beta2 {beta2} --adam-eps {bare.EPSILON} --cpu --eval-iters 0
    """.split()


def run_config(sizes: Sizes, *more: str, world_size: int = 1, data: str = "--mock-data") -> Config:
    """The Config of these flags and `more` (layout, batch), with the vocabulary known.

    more, data: flags as text, one or several to a string.
    """
    words = " ".join([data, "--train-iters 1000000", *more]).split()
    config = parse_arguments([*run_flags(sizes), *words], Environment(world_size=world_size))
    return with_vocabulary(config, sizes.vocabulary)


class PreparedRun:
    """The run that pretrain_gpt.py would train, over batches that lie ready on the device, taken round and round."""

    def __init__(self, config: Config, batches: Sequence[Batch], device: str | torch.device = "cpu") -> None:
        """batches: tokens and labels [M*B, S] of this data-parallel rank."""
        self.run = build_run(config, build_mesh(config, torch.device(device)))
        self._following = cycle(batches)

    def next_batch(self, global_batch_size: int) -> Batch:
        """As the Loader's."""
        return next(self._following)

    def step(self) -> StepResult:
        """The program's whole step, but for reading data."""
        return self.run.step(self)


class Logits(nn.Module):
    """A model of transformers as a function from tokens [B, S] to logits [B, S, V]; nothing is cached."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def transformers_step(job: Job, experts: str = "eager") -> Step:
    """transformers' model of these sizes in the bare loop, as an export of ours: SDPA, the same fused AdamW.

    experts: which of transformers' implementations; a mixture has no balancing loss.
    """
    import transformers  # an optional package

    transformers.utils.logging.disable_progress_bar()
    ours, weights = run_config(job.sizes).model, dict(bare_model(job.sizes).state_dict())
    family = choose_family(ours)
    content = model_config_json(ours, family, "float32", {})
    kernels = {"attn_implementation": "sdpa", "experts_implementation": experts}
    config = transformers.AutoConfig.for_model(**content, **kernels)
    state = {
        entry.theirs: to_theirs(entry, [weights[name] for name in entry.ours], ours)
        for entry in tensor_maps(family, ours, weights)
    }
    kind = getattr(transformers, family.architecture)
    model = kind.from_pretrained(None, config=config, state_dict=state)
    return loop(job, Logits(model.train()))


def our_step(job: Job, flags: str = "") -> Step:
    """The program's own step, in the layout that the flags ask for."""
    words = f"--global-batch-size {job.global_batch} {flags}"
    prepared = PreparedRun(run_config(job.sizes, words, world_size=dist.get_world_size()), job.batches)
    return lambda: prepared.step().loss
