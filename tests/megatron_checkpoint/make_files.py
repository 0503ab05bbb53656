"""Write the files that the tests read, with megatron-core on the CPU. Run by hand, once:

    python -m venv --system-site-packages V; V/bin/pip install --no-deps megatron-core==0.16.1 psutil
    V/bin/python tests/megatron_checkpoint/make_files.py

files/NAME/iter_0000005 is a checkpoint, files/NAME.pt the tokens [1, S] and megatron-core's logits [1, S, V].
torch_dist checkpoints are written by megatron.core.dist_checkpointing. The older format, one mp_rank_* file a rank,
is written by Megatron-LM's training program, which is no package: here it is torch.save of the same dict
({model: state_dict, args, iteration}) with the state_dict that each megatron-core rank has.
"""

import argparse
import contextlib
import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

FILES = Path(__file__).parent / "files"
VOCAB, LENGTH = 40, 12
CASES = {
    "dist_gqa": {"groups": 2, "untied": True, "tp": 1, "legacy": False},
    "dist_tied_tp2": {"groups": 4, "untied": False, "tp": 2, "legacy": False},
    "legacy_gqa_tp2": {"groups": 2, "untied": True, "tp": 2, "legacy": True},
    "dist_experts": {"groups": 2, "untied": True, "tp": 1, "legacy": False, "experts": "softmax"},
    "dist_experts_pattern": {"groups": 2, "untied": True, "tp": 1, "legacy": False, "experts": "sigmoid"},
    "dist_experts_ep2": {
        "groups": 2,
        "untied": True,
        "tp": 1,
        "ep": 2,
        "legacy": False,
        "experts": "softmax",
    },
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 8,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "allgather",
    "moe_router_load_balancing_type": "none",
}
MIXTURES = {
    "softmax": {},
    "sigmoid": {
        "moe_layer_freq": [0, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_shared_expert_intermediate_size": 12,
        "moe_shared_expert_gate": True,
        "moe_router_topk_scaling_factor": 1.5,
    },
}


class NoRandomStates:
    """megatron-core forks CUDA generators for dropout, which is 0 here."""

    def fork(self, *names):
        return contextlib.nullcontext()


def build(case):
    """A tiny Llama-type GPTModel."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts = EXPERTS | MIXTURES[case["experts"]] if "experts" in case else {}
    config = TransformerConfig(
        **experts,
        expert_model_parallel_size=case.get("ep", 1),
        num_layers=2,
        hidden_size=16,
        ffn_hidden_size=24,
        num_attention_heads=4,
        num_query_groups=case["groups"],
        kv_channels=4,
        tensor_model_parallel_size=case["tp"],
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        normalization="RMSNorm",
        layernorm_epsilon=1e-5,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.4,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
    )
    layers = get_gpt_layer_local_spec(normalization="RMSNorm")
    if experts:
        layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    model = GPTModel(
        config,
        layers,
        vocab_size=VOCAB,
        max_sequence_length=32,
        position_embedding_type="rope",
        rotary_base=10000,
        share_embeddings_and_output_weights=not case["untied"],
        parallel_output=False,
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    for name, buffer in model.named_buffers():
        if name.endswith("expert_bias"):
            buffer.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0]))
    return model.eval()


def ranks_of(case):
    """Processes: tensor ranks, or expert ranks."""
    return case["tp"] * case.get("ep", 1)


def write(rank, name, case, port):
    """One rank: build, run, save."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(ranks_of(case)), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo")
    from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # left undefined where Transformer Engine is not installed
    parallel_state.initialize_model_parallel(case["tp"], 1, expert_model_parallel_size=case.get("ep", 1))
    tensor_parallel.get_cuda_rng_tracker = NoRandomStates
    torch.manual_seed(3)
    model = build(case)
    tokens = (torch.arange(LENGTH)[None] * 7 + 3) % VOCAB
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    with torch.no_grad():
        logits = model(tokens, torch.arange(LENGTH)[None], mask)
    folder = FILES / name / "iter_0000005"
    folder.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    if case["legacy"]:
        at = folder / f"mp_rank_{rank:02d}"
        at.mkdir(exist_ok=True)
        content = {"model": model.state_dict_for_save_checkpoint(), "args": argparse.Namespace(num_layers=2)}
        torch.save(content | {"iteration": 5, "checkpoint_version": 3.0}, at / "model_optim_rng.pt")
    else:
        dist_checkpointing.save({"model": model.sharded_state_dict()}, str(folder))
    if rank == 0:
        (FILES / name / "latest_checkpointed_iteration.txt").write_text("5")
        torch.save({"tokens": tokens, "logits": logits.clone()}, FILES / f"{name}.pt")
    dist.barrier()


if __name__ == "__main__":
    wanted = sys.argv[1:] or list(CASES)
    for name in wanted:
        shutil.rmtree(FILES / name, ignore_errors=True)
    for number, name in enumerate(wanted):
        mp.spawn(write, (name, CASES[name], 29611 + number), ranks_of(CASES[name]))
    print(sorted(str(path.relative_to(FILES)) for path in FILES.rglob("*") if path.is_file()))
