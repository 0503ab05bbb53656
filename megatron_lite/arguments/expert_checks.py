"""What flags of a mixture of experts cannot be together, in one sentence each."""

from megatron_lite.arguments.megatron_flags import ACCEPTED
from megatron_lite.arithmetic.batch_size import BatchSchedule, pass_size
from megatron_lite.arithmetic.costs import GROUPED_MM_BYTES
from megatron_lite.arithmetic.mesh_sizes import mesh_sizes
from megatron_lite.arithmetic.sharding import splits_backward
from megatron_lite.config import Config, ConfigError
from megatron_lite.config.declare import flag_name
from megatron_lite.config.model import EXPERT_FIELDS

_BALANCING = ("aux_loss", "seq_aux_loss", "none")
_OTHER_BALANCING = {
    "global_aux_loss": "its value depends on how many ranks share the batch, so that no two layouts agree",
    "sinkhorn": "it routes otherwise in training than in evaluation",
    "quantile_balancing": "it has no counterpart here",
}


def check_experts(config: Config) -> None:
    """Raise ConfigError for the first flag of a mixture of experts that does not fit."""
    if not config.model.num_experts:
        _check_dense(config)
        return
    for check in (_check_accepted, _check_choice, _check_groups, _check_losses, _check_widths, _check_layout):
        check(config)


def _check_dense(config: Config) -> None:
    model, parallel = config.model, config.parallel
    if model.moe_ffn_hidden_size is not None:
        raise ConfigError(
            f"--moe-ffn-hidden-size {model.moe_ffn_hidden_size} is the width of an expert and the model is dense: give "
            "--num-experts, or leave it out"
        )
    if parallel.expert_model_parallel_size > 1:
        raise ConfigError(
            f"--expert-model-parallel-size {parallel.expert_model_parallel_size} spreads experts over ranks and the "
            "model is dense: give --num-experts, or leave it out"
        )


def _check_accepted(config: Config) -> None:
    """Refuse the flags that only a dense model does not read."""
    for name, row in ACCEPTED.items():
        if row.here == "dense" and name in config.given:
            raise ConfigError(f"{name}: {row.text}")


def _check_choice(config: Config) -> None:
    model = config.model
    experts, chosen = model.num_experts, model.moe_router_topk
    if chosen > experts:
        raise ConfigError(f"--moe-router-topk {chosen} is more than --num-experts {experts}")
    softmax = model.moe_router_score_function == "softmax"
    if softmax and chosen == 1 and not model.moe_router_pre_softmax:
        raise ConfigError(
            "--moe-router-topk 1 with --moe-router-score-function softmax gives every token the weight 1 and the "
            "router no gradient, wanted --moe-router-pre-softmax too"
        )
    if softmax and model.moe_router_enable_expert_bias:
        raise ConfigError(
            "--moe-router-enable-expert-bias is added to sigmoid scores and --moe-router-score-function is softmax, "
            "wanted sigmoid"
        )
    if not any(model.moe_layer_freq):
        raise ConfigError(f"--num-experts {experts} with a --moe-layer-freq of zeros: no layer has experts")


def _check_groups(config: Config) -> None:
    model = config.model
    groups, kept = model.moe_router_num_groups, model.moe_router_group_topk
    if (groups is None) != (kept is None):
        given, other = ("num-groups", "group-topk") if kept is None else ("group-topk", "num-groups")
        raise ConfigError(
            f"--moe-router-{given} {groups or kept} needs --moe-router-{other} too: groups are chosen, then experts"
        )
    if groups is None:
        return
    experts, chosen = model.num_experts, model.moe_router_topk
    if experts % groups:
        raise ConfigError(f"--num-experts {experts} does not divide by --moe-router-num-groups {groups}")
    if kept > groups:
        raise ConfigError(f"--moe-router-group-topk {kept} is more than --moe-router-num-groups {groups}")
    if chosen % kept:
        raise ConfigError(f"--moe-router-topk {chosen} does not divide by --moe-router-group-topk {kept}")
    if chosen > kept * (experts // groups):
        raise ConfigError(
            f"--moe-router-topk {chosen} is more than the {kept * (experts // groups)} experts of "
            f"--moe-router-group-topk {kept} groups"
        )


def _check_losses(config: Config) -> None:
    model = config.model
    kinds, coefficients = model.moe_router_load_balancing_type, model.moe_aux_loss_coeff
    for kind in kinds:
        if kind not in _BALANCING:
            reason = f": {_OTHER_BALANCING[kind]}" if kind in _OTHER_BALANCING else ""
            raise ConfigError(
                f"--moe-router-load-balancing-type {kind} is not supported, wanted {' or '.join(_BALANCING)}{reason}"
            )
    if len(kinds) != len(coefficients):
        raise ConfigError(
            f"--moe-router-load-balancing-type names {len(kinds)} losses and --moe-aux-loss-coeff has "
            f"{len(coefficients)}, wanted as many"
        )
    if len(set(kinds)) != len(kinds) or ("none" in kinds and len(kinds) > 1):
        raise ConfigError(
            f"--moe-router-load-balancing-type is {' '.join(kinds)}, wanted each loss once, or none alone"
        )


def _check_widths(config: Config) -> None:
    model, precision = config.model, config.precision
    shared, bias = model.moe_shared_expert_intermediate_size, not model.disable_bias_linear
    if shared and bias:
        raise ConfigError(
            f"--moe-shared-expert-intermediate-size {shared} goes with linears without bias, wanted "
            "--disable-bias-linear too"
        )
    if model.moe_shared_expert_gate and not shared:
        raise ConfigError(
            "--moe-shared-expert-gate multiplies a shared expert and there is none, wanted "
            "--moe-shared-expert-intermediate-size too"
        )
    bytes_each = 2 if precision.bf16 or precision.fp16 else 4
    multiple = GROUPED_MM_BYTES // bytes_each
    for name, width in (
        ("--hidden-size", model.hidden_size),
        ("--moe-ffn-hidden-size", model.moe_ffn_hidden_size),
    ):
        if width % multiple:
            raise ConfigError(
                f"{name} is {width}, wanted a multiple of {multiple}: the kernel that computes the experts takes rows "
                f"of {GROUPED_MM_BYTES} bytes, at {bytes_each} bytes a number"
            )


def _check_layout(config: Config) -> None:
    model, parallel, precision = config.model, config.parallel, config.precision
    tensor, expert = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    if model.num_experts % expert:
        raise ConfigError(
            f"--num-experts {model.num_experts} does not divide by --expert-model-parallel-size {expert}"
        )
    if parallel.expert_tensor_parallel_size is None and tensor > 1:
        raise ConfigError(
            f"--expert-tensor-parallel-size is not given and is --tensor-model-parallel-size {tensor} in Megatron, "
            "which splits each expert: wanted --expert-tensor-parallel-size 1"
        )
    if parallel.expert_tensor_parallel_size not in (None, 1):
        raise ConfigError(
            f"--expert-tensor-parallel-size {parallel.expert_tensor_parallel_size} splits each expert over ranks, "
            "which is not supported, wanted 1"
        )
    if tensor > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"--tensor-model-parallel-size {tensor} with --num-experts {model.num_experts} needs --sequence-parallel "
            "too: each tensor rank routes its own positions"
        )
    sizes = mesh_sizes(parallel)
    ranks = sizes["dp_shard"] * sizes["cp"] * tensor
    if ranks % expert:
        raise ConfigError(
            f"--expert-model-parallel-size {expert} does not divide the {ranks} ranks of one replica that have other "
            "tokens: data-parallel shards x --context-parallel-size x --tensor-model-parallel-size"
        )
    if parallel.compile and expert > 1:
        raise ConfigError(
            f"--compile with --expert-model-parallel-size {expert}: the host reads how many tokens go to each rank in "
            "the middle of a layer, which torch cannot trace; leave one out"
        )
    if parallel.compile and not precision.bf16:
        raise ConfigError(
            "--compile with --num-experts computes in --bf16 only: torch cannot trace the experts' kernel in "
            f"{'fp16' if precision.fp16 else 'fp32'}; give --bf16 or leave --compile out"
        )


def _check_split_backward(config: Config) -> None:
    """FSDP finds some gradients of experts in the reduction's format and some in the computation's."""
    parallel, precision = config.parallel, config.precision
    own_unit = parallel.expert_model_parallel_size > 1 or parallel.tensor_model_parallel_size > 1
    reduced = precision.fp16 or (precision.bf16 and not precision.grad_reduce_in_bf16)
    if not (config.model.num_experts and own_unit and reduced and splits_backward(config)):
        return
    batches = BatchSchedule.from_config(config)
    for _, batch_size in batches.steps:
        count = pass_size(batch_size // batches.samples_per_microbatch, parallel.max_microbatches_per_step)
        if count == 1:
            raise ConfigError(
                f"--pipeline-schedule {parallel.pipeline_schedule} runs the backward in two parts, and a pass of 1 "
                "microbatch is too few for experts over ranks in a half format, wanted at least 2, or 1f1b"
            )


def expert_notes(config: Config) -> list[str]:
    """Notes on a mixture of experts whose numbers are another's than one might think."""
    model = config.model
    if not model.num_experts:
        names = [flag_name(name) for name in sorted(EXPERT_FIELDS & config.given - {"num_experts"})]
        return (
            [f"{', '.join(names)} {'does' if len(names) == 1 else 'do'} nothing without --num-experts"]
            if names
            else []
        )
    if (config.precision.bf16 or config.precision.fp16) and model.moe_router_dtype is None:
        return [
            "the router's logits are computed in the format of the activations, which makes different scores equal, as "
            "in Megatron: --moe-router-dtype fp32 keeps them apart"
        ]
    return []


CHECKS = (check_experts, _check_split_backward)
