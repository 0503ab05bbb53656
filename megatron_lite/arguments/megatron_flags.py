"""Megatron's flags that are no field here: old spellings, accepted without effect, refused.

Kept as short texts: one reason, then the flags it holds for. A flag's ending says what follows it: nothing for a
switch, `=` for one value, `=a|b` for one of these values and no other, `=+` for one or more, `=*` for any number.
"""

from typing import NamedTuple


class Accepted(NamedTuple):
    """A flag read without effect: nargs as argparse's, 0 = a switch; values = what may follow, if bounded."""

    nargs: int | str
    reason: str
    values: tuple[str, ...] | None = None


# Old spelling -> the words that stand for it. A value after it follows the last word.
RENAMED: dict[str, tuple[str, ...]] = {
    "--activations-checkpoint-method": ("--recompute-granularity", "full", "--recompute-method"),
    "--activations-checkpoint-num-layers": ("--recompute-num-layers",),
    "--checkpoint-num-layers": ("--recompute-num-layers",),
    "--warmup": ("--lr-warmup-fraction",),
    "--persistent-save-interval": ("--save-interval",),
    "--most-recent-k": ("--keep-last",),
    "--encoder-num-layers": ("--num-layers",),
    "--pad-vocab-size-to": ("--padded-vocab-size",),
    "--tokenizer-name-or-path": ("--tokenizer-model",),
    "--tokenizer-library": ("--tokenizer-type",),
}

# Switches that set other fields: flag -> {field: value}.
SETS: dict[str, dict[str, object]] = {
    "--use-rotary-position-embeddings": {"position_embedding_type": "rope"},
    "--checkpoint-activations": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "--torch-fsdp2-no-reshard-after-forward": {"reshard_after_forward": "never"},
}
# The same, where the field is not given already.
SETS_UNLESS_GIVEN: dict[str, dict[str, object]] = {
    "--no-position-embedding": {"position_embedding_type": "none"},
}

_ACCEPTED: dict[str, str] = {
    "there is one implementation of the model": (
        "--transformer-impl= --use-mcore-models --use-legacy-models --enable-experimental --disable-jit-fuser"
    ),
    "checkpoints are written by torch.distributed.checkpoint, in parallel, and load in any layout": (
        "--ckpt-format= --auto-detect-ckpt-format --use-dist-ckpt --dist-ckpt-format= --dist-ckpt-strictness= "
        "--dist-ckpt-optim-fully-reshardable --ckpt-fully-parallel-load --ckpt-fully-parallel-save "
        "--no-ckpt-fully-parallel-save --ckpt-assume-constant-structure --use-persistent-ckpt-worker "
        "--async-strategy= --async-ckpt-use-cpu-shm --load-main-params-from-ckpt --dist-ckpt-save-pre-mcore-014 "
        "--no-use-tokenizer-model-from-checkpoint-args --use-tokenizer-model-from-checkpoint-args "
        "--ckpt-convert-update-legacy-dist-opt-format --ckpt-load-validate-sharding-integrity "
        "--no-ckpt-load-validate-sharding-integrity --dist-ckpt-workers= --async-ckpt-use-cached-structure "
        "--strict-fsdp-dtensor-load --no-strict-fsdp-dtensor-load --enable-msc --disable-msc "
        "--async-ckpt-cpu-priority= --async-ckpt-io-priority= --ckpt-fully-parallel-load-exchange-algo= "
        "--ckpt-fully-parallel-load-per-rank-objects --ckpt-fully-parallel-save-process-group= "
        "--ckpt-fully-parallel-load-process-group= --ckpt-pg-tensors-cache-path= --ckpt-pg-tensors-cache-create "
        "--ckpt-drop-redundant-extra-state "
        "--distrib-optim-fully-reshardable-mem-efficient --dump-param-to-param-group-map="
    ),
    "a checkpoint loads in any layout: the flags say which": "--use-mp-args-from-checkpoint-args",
    "FSDP2 shards weights, gradients and optimizer state, and overlaps its communication, by itself": (
        "--use-distributed-optimizer --use-torch-fsdp2 --use-megatron-fsdp --overlap-grad-reduce "
        "--overlap-param-gather --overlap-param-gather-with-optimizer-step --ddp-average-in-collective "
        "--use-contiguous-parameters-in-local-ddp --megatron-fsdp-version= "
        "--ddp-bucket-size= --ddp-num-buckets= --ddp-pad-buckets-for-high-nccl-busbw --no-delay-grad-reduce "
        "--delay-grad-reduce --delay-param-gather --align-grad-reduce --no-align-grad-reduce --align-param-gather "
        "--no-align-param-gather --fsdp-double-buffer --fsdp-manual-registration "
        "--suggested-communication-unit-size= "
        "--DDP-impl= --use-contiguous-buffers-in-local-ddp --no-contiguous-buffers-in-local-ddp "
        "--keep-fp8-transpose-cache-when-using-custom-fsdp --use-custom-fsdp --gradient-reduce-div-fusion "
        "--no-gradient-reduce-div-fusion --fsdp-manual-registration-bytes= --enable-full-sharding-in-hsdp "
        "--no-shard-embeddings --no-pin-cpu-grads --no-pin-cpu-params "
        "--ddp-reduce-scatter-with-fp32-accumulation --megatron-fsdp-use-decoupled-grad "
        "--fsdp-db-use-persist-buf-on-alloc-fail --megatron-fsdp-enable-fine-grained-param-gather "
        "--megatron-fsdp-max-pool-double-buffer --no-use-layer-wise-param-layout "
        "--gradient-reduce-div-factor=1 --outer-dp-sharding-strategy=no_shard"
    ),
    "main weights, gradients and optimizer state are fp32": (
        "--megatron-fsdp-main-params-dtype=fp32|auto|bf16|fp16 --megatron-fsdp-main-grads-dtype=fp32|auto|bf16|fp16 "
        "--ddp-param-name-patterns-for-fp32-local-accumulation=+ "
        "--use-precision-aware-optimizer --main-grads-dtype=fp32|bf16 --main-params-dtype=fp32|fp16 "
        "--exp-avg-dtype=fp32|fp16|bf16|fp8 --exp-avg-sq-dtype=fp32|fp16|bf16|fp8 "
        "--accumulate-allreduce-grads-in-fp32"
    ),
    "--grad-reduce-in-bf16 says in what format gradients are reduced": "--megatron-fsdp-grad-comm-dtype=",
    "attention, softmax and fused kernels are PyTorch's own": (
        "--attention-softmax-in-fp32 --apply-query-key-layer-scaling --no-query-key-layer-scaling --use-flash-attn "
        "--use-flash-attn-v1 --use-flash-attn-v2 --use-flash-attn-triton --flash-attention-version= "
        "--no-masked-softmax-fusion "
        "--no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
        "--no-persist-layer-norm --no-gradient-accumulation-fusion --cross-entropy-fusion-impl= "
        "--apply-rope-fusion --use-fused-rmsnorm --use-fused-swiglu --use-fused-rotary-pos-emb "
        "--use-rotary-position-embeddings-fusion --use-te-activation-func "
        "--memory-efficient-layer-norm --no-memory-efficient-layer-norm --fused-residual-rmsnorm "
        "--use-transformer-engine-op-fuser --use-fused-weighted-squared-relu --no-te-rms-norm"
    ),
    "softmax, rotation and loss are computed in fp32, the residual in the format of the run": (
        "--fp32-residual-connection --embedding-weights-in-fp32 --rotary-position-embeddings-in-fp32 "
        "--fp16-lm-cross-entropy --disable-bf16-reduced-precision-matmul"
    ),
    "communication of tensor parallelism is DTensor's": (
        "--tp-comm-overlap --tp-comm-overlap-cfg= --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs "
        "--tp-comm-overlap-rs-dgrad --disable-tp-comm-bulk-dgrad --disable-tp-comm-bulk-wgrad --tp-comm-bulk-dgrad "
        "--tp-comm-bulk-wgrad --disable-tp-comm-split-ag --disable-tp-comm-split-rs --tp-comm-bootstrap-backend= "
        "--no-async-tensor-model-parallel-allreduce --async-tensor-model-parallel-allreduce "
        "--sync-tp-duplicated-parameters --clone-scatter-output-in-embedding "
        "--no-clone-scatter-output-in-embedding --distribute-saved-activations "
        "--distribute-checkpointed-activations --symmetric-ar-type="
    ),
    "the pipeline's communication is torch.distributed.pipelining's": (
        "--overlap-p2p-communication --no-overlap-p2p-communication --overlap-p2p-communication-warmup-flush "
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit= --no-scatter-gather-tensors-in-pipeline "
        "--use-ring-exchange-p2p --pipeline-model-parallel-comm-backend= --batch-p2p-communication "
        "--no-batch-p2p-comm --deallocate-pipeline-outputs --no-deallocate-pipeline-outputs --delay-wgrad-compute"
    ),
    "NCCL on GPUs, gloo on CPUs": "--distributed-backend=nccl|nccl2|gloo",
    "process groups and NCCL are set up by torch": (
        "--disable-gloo-process-groups --enable-gloo-process-groups --high-priority-stream-groups=* --use-nccl-ub "
        "--nccl-ub --nccl-communicator-config-path= --use-sharp --sharp-enabled-group= "
        "--disable-symmetric-registration --create-all-gather-group --lazy-mpu-init="
    ),
    "the mesh is tp-cp-dp-pp, innermost first": "--use-tp-pp-dp-mapping",
    "torchrun tells each process its rank": "--local-rank= --local_rank=",
    "the model is dense": (
        "--expert-model-parallel-size=1 --expert-tensor-parallel-size= --expert-tensor-parallel-num-weight-shards=1 "
        "--moe-grouped-gemm --moe-token-dispatcher-type= --moe-router-topk= --moe-router-load-balancing-type=+ "
        "--moe-aux-loss-coeff=+ --moe-z-loss-coeff= --moe-input-jitter-eps= --moe-router-score-function= "
        "--moe-router-pre-softmax --moe-router-num-groups= --moe-router-group-topk= "
        "--moe-router-topk-scaling-factor= --moe-router-dtype= --moe-router-enable-expert-bias "
        "--moe-router-bias-update-rate= --moe-router-fusion --moe-router-force-load-balancing "
        "--moe-router-padding-for-fp8 --moe-router-padding-for-quantization --moe-permute-fusion "
        "--moe-per-layer-logging --moe-expert-capacity-factor= --moe-pad-expert-input-to-capacity "
        "--moe-token-drop-policy= --moe-token-dropping --moe-layer-recompute --moe-layer-freq= --moe-extended-tp "
        "--moe-shared-expert-overlap --moe-shared-expert-intermediate-size= --moe-shared-expert-gate "
        "--moe-use-legacy-grouped-gemm --moe-enable-deepep --moe-deepep-num-sms= --moe-flex-dispatcher-backend= "
        "--moe-hybridep-num-sms= --moe-apply-probs-on-input --overlap-moe-expert-parallel-comm "
        "--moe-ffn-hidden-size= --moe-latent-size= --moe-router-topk-limited-devices= --moe-router-force-biased= "
        "--moe-router-quantile-balancing-ema= --moe-enable-routing-replay --moe-upcycling-granularity= "
        "--moe-single-grouped-weight --moe-single-grouped-bias --moe-use-grouped-tensor "
        "--use-grouped-gemm-for-shared-expert --moe-shared-expert-glu-interleave-size= "
        "--moe-mlp-glu-interleave-size= --moe-expert-rank-capacity-factor= --moe-flex-dispatcher-num-sms= "
        "--moe-hybridep-num-sms-preprocessing= --moe-hybridep-num-blocks-permute= "
        "--moe-hybridep-num-blocks-unpermute= --moe-permute-fusion-into-hybridep "
        "--moe-hybridep-pad-uneven-dispatch-inputs --moe-ncclep-zero-copy --moe-dispatch-fwd-dtype= "
        "--moe-combine-bwd-dtype= --moe-paged-stash --moe-paged-stash-page-size= "
        "--moe-paged-stash-buffer-size-factor-cuda= --moe-paged-stash-buffer-size-factor-cpu= "
        "--moe-pad-experts-for-cuda-graph-inference --save-tokens-per-expert-interval="
    ),
    "only multi-latent attention reads it": (
        "--q-lora-rank= --kv-lora-rank= --qk-head-dim= --qk-pos-emb-head-dim= --v-head-dim= --cache-mla-latents "
        "--mscale= --mscale-all-dim= --beta-fast= --beta-slow= --rotary-scaling-factor= "
        "--original-max-position-embeddings= --mla-down-proj-fusion"
    ),
    "only --position-embedding-type yarn reads it": (
        "--yarn-rotary-scaling-factor= --yarn-original-max-position-embeddings= --yarn-beta-fast= --yarn-beta-slow= "
        "--yarn-mscale= --yarn-mscale-all-dim= --yarn-correction-range-round-to-int "
        "--no-yarn-correction-range-round-to-int"
    ),
    "only --optimizer lion reads it": "--lion-beta1= --lion-beta2=",
    "evaluation takes microbatches of --micro-batch-size": "--eval-micro-batch-size=",
    "weights are sharded over --tensor-model-parallel-size ranks": "--tensor-parallel-num-weight-shards=",
    "the loader makes no [S, S] mask: attention works out what it needs": (
        "--no-create-attention-mask-in-dataloader --create-attention-mask-in-dataloader"
    ),
    "data is read in the indexed format, memory-mapped": (
        "--data-impl=mmap|infer --mmap-warmup --num-dataset-builder-threads= --legacy-tokenizer "
        "--mid-level-dataset-surplus=0.005 --exit-signal-handler-for-dataloader "
        "--object-storage-cache-path= --s3-cache-path= --defer-npy-index-mmap --fast-cache-load"
    ),
    "a non-finite step is skipped and counted on all ranks": "--rerun-mode= --result-rejected-tracker-filename=",
    "the log says what each step took, on every rank": (
        "--log-straggler --disable-straggler-on-startup --straggler-ctrlr-port= --straggler-minmax-count= "
        "--no-barrier-with-level-1-timing --barrier-with-L1-time --enable-one-logger --no-one-logger "
        "--one-logger-project= --one-logger-run-name= --one-logger-entity= --one-logger-async --app-tag-run-name= "
        "--app-tag-run-version= --log-interval-straggler= --distributed-timeout-seconds-after-init= "
        "--flight-recorder-dump-path= --nccl-flight-recorder --run-workload-inspector-server "
        "--workload-inspector-server-port= --log-level= --log-level-replica= --codecarbon-dir= --otel-enabled "
        "--otel-span-groups= "
        "--otel-service-name= --flight-recorder-trace-buffer-size= --flight-recorder-include-stack-trace"
    ),
    "learning rate, batch and world size, loss scale, throughput and memory are always logged": (
        "--log-batch-size-to-tensorboard --log-world-size-to-tensorboard --log-learning-rate-to-tensorboard "
        "--log-loss-scale-to-tensorboard --no-log-learnig-rate-to-tensorboard --no-log-learning-rate-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --log-throughput-to-tensorboard --throughput-window-size= "
        "--log-l2-norm-grad-to-tensorboard --log-runtime-to-tensorboard --runtime-time-unit= "
        "--tensorboard-queue-size= --log-memory-interval= --log-device-memory-used --log-energy"
    ),
    "--profile is torch's profiler": (
        "--use-pytorch-profiler --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack "
        "--pytorch-profiler-collect-chakra --record-shapes --nvtx-ranges --record-memory-history "
        "--memory-snapshot-path="
    ),
    "the launcher restarts a run, which then resumes by itself": (
        "--adlr-autoresume --adlr-autoresume-interval= --enable-ft-package --calc-ft-timeouts --ft-num-warmup-iters= "
        "--inprocess-restart "
        "--inprocess-max-iterations= --inprocess-monitor-thread-interval= --inprocess-monitor-process-interval= "
        "--inprocess-progress-watchdog-interval= --inprocess-heartbeat-interval= --inprocess-heartbeat-timeout= "
        "--inprocess-soft-timeout= --inprocess-hard-timeout= --inprocess-barrier-timeout= "
        "--inprocess-completion-timeout= --inprocess-last-call-wait= --inprocess-termination-grace-time= "
        "--inprocess-granularity= --inprocess-active-world-size= --inprocess-empty-cuda-cache"
    ),
    "gelu is its tanh form here": "--openai-gelu",
    "the tokenizer's files say all that is needed": (
        "--trust-remote-code --tokenizer-hf-use-fast --tokenizer-hf-no-use-fast --tokenizer-sentencepiece-legacy "
        "--no-tokenizer-sentencepiece-legacy --tokenizer-hf-include-special-tokens "
        "--tokenizer-hf-no-include-special-tokens --tokenizer-special-tokens=+ "
        "--no-trust-remote-code"
    ),
    "no token is taken for padding": "--allow-ambiguous-pad-tokens",
    "the default here": (
        "--softmax-type=vanilla --attention-mask-type=causal --exit-signal=SIGTERM|15 "
        "--rotary-seq-len-interpolation-factor=1 --te-rng-tracker --no-initialization --no-manual-gc-eval "
        "--train-sync-interval= --config-logger-dir= --onnx-safe= --glu-activation=swiglu "
        "--rope-type=rope --abort-on-unmet-fused-kernel-constraints"
    ),
}

_REFUSED: dict[str, str] = {
    "FP8 and FP4 are not supported: train in --bf16": "--transformer-engine-precision",
    "CUDA graphs are not supported: --compile fuses each block": (
        "--enable-cuda-graph --external-cuda-graph --optimizer-cuda-graph"
    ),
    "muP is not supported: choose --lr and --init-method-std for the size at hand": "--use-mup",
    "the self test of Megatron's rerun machine has nothing to test here: leave it out": "",
    "fill-in-the-middle data is not supported: transform the text before preprocess_data.py": "",
    "hierarchical context parallelism is not supported: use --cp-comm-type p2p, all_gather or a2a": (
        "--hierarchical-context-parallel-sizes --dynamic-context-parallel --max-seqlen-per-dp-cp-rank "
        "--max-seqlen-per-cp-rank"
    ),
    "mixture of experts is not supported: this trains dense models": (
        "--num-experts --use-tutel --router-aux-loss-coef --expert-interval --topk --mlp-type "
        "--ep-overlap-early-attn-memory-release --create-moe-param-group"
    ),
    "multi-latent attention is not supported: use multi-head or grouped-query attention": "--multi-latent-attention",
    "a layer spec of Megatron's own modules has no counterpart: flags describe the model, leave it out": "--spec",
    "multimodal and vision models are not supported: this trains text models": (
        "--img-h --img-w --num-channels --patch-dim --num-classes --classes-fraction --data-per-class-fraction "
        "--no-data-sharding --head-lr-mult --iter-per-epoch --mask-type --mask-factor --mrope-section --freeze-LM "
        "--freeze-ViT --allow-missing-vision-projection-checkpoint --disable-vision-class-token --swin-backbone-type "
        "--use-tiling --max-num-tiles --use-thumbnail --special-tokens --tokenizer-prompt-format --freeze-lm "
        "--freeze-vit"
    ),
    "encoder models (BERT, T5, retrieval) are not supported: this trains decoder-only models": (
        "--decoder-num-layers --decoder-seq-length --retriever-seq-length --vocab-extra-ids --sample-rate "
        "--mask-prob --short-seq-prob --titles-data-path --query-in-block-prob --evidence-data-path "
        "--block-data-path --embedding-path --indexer-batch-size --indexer-log-interval "
        "--pipeline-model-parallel-split-rank --use-one-sent-docs"
    ),
    "inference is not trained with: see tools/generate.py and tools/hf_export.py": (
        "--flash-decode --max-tokens-to-oom --output-bert-embeddings --bert-embedder-type --enable-chunked-prefill "
        "--use-checkpoint-for-inference --use-legacy-static-engine --num-speculative-tokens --prefill-chunk-size "
        "--decode-only-cuda-graphs"
    ),
    "reinforcement learning is not supported: export by tools/hf_export.py for it": "--perform-rl-step --refit-method",
    "instruction tuning and distillation are not supported: this pretrains": (
        "--sft --padding-from-hf --load-teacher --finetune-data-split --finetune-hf-dataset"
    ),
    "state-space and hybrid models are not supported: this trains transformers": (
        "--is-hybrid-model --disable-mamba-mem-eff-path "
        "--heterogeneous-layers-config-path --heterogeneous-layers-config-encoded-json"
    ),
    "multi-token prediction is not supported": "--use-multi-token-prediction",
    "sparse and linear attention are not supported: --window-size gives a sliding window": (
        "--window-attn-skip-freq --no-rope-freq --attention-output-gate --no-weight-decay-cond-type "
        "--apply-wd-to-qk-layernorm --qk-clip"
    ),
    "a model is pre-norm, with gelu, swiglu or squared_relu: leave it out": (
        "--apply-residual-connection-post-layernorm --quick-gelu --glu-linear-offset --embed-layernorm "
        "--activation-func-clamp-value --sandwich-norm --post-norm --quick-geglu"
    ),
    "weights start as N(0, --init-method-std), the same on every rank and in every layout": (
        "--init-method-xavier-uniform --data-parallel-random-init --embedding-init-method-std"
    ),
    "the batch has to divide: choose --global-batch-size as a multiple of micro batch x data-parallel size": (
        "--decrease-batch-size-if-needed"
    ),
    "use --fsdp-cpu-offload": (
        "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-torch-optimizer-for-cpu-offload"
    ),
    "use --account-for-embedding-in-pipeline-split or --pipeline-model-parallel-layout": "--standalone-embedding-stage",
    "use --save-interval with --async-save": "--replication --replication-jump --replication-factor",
    "write the flags into a file and pass it as @FILE": "--yaml-cfg",
    "Muon is torch's, with its own settings": "",
    "DeepSpeed's flags mean nothing here: --data-parallel-sharding-strategy says what is sharded": (
        "--zero-stage --no-pipeline-parallel --checkpoint-in-cpu --contigious-checkpointing --synchronize-each-layer "
        "--ds-sequence-parallel-size --universal-checkpoint --ds-inference"
    ),
    'name the sets in --per-split-data-args-path: {"valid": {"name": ["prefix"]}}': (
        "--multiple-validation-sets --train-weighted-split-paths --valid-weighted-split-paths "
        "--test-weighted-split-paths --train-weighted-split-paths-path --valid-weighted-split-paths-path "
        "--test-weighted-split-paths-path"
    ),
    "use --qk-layernorm": "--qk-l2-norm",
    "use --reset-attention-mask": "--dataloader-inter-document-masking",
    "use --iterations-to-skip": "--skip-train-iteration-range",
    "use --exit-signal-handler: a signal stops a run, saved": "--kill-switch-path",
    "relative positions are not supported: use --position-embedding-type rope": "",
    "TikTokenizer has Megatron's seven special tokens: leave it out": "--tiktoken-special-tokens",
    "rehearse with --dry-run, plan with --check": "--fake-process-group --simulate-global-step --execute-mode",
    "use --recompute-granularity with --recompute-modules, or --fsdp-cpu-offload": (
        "--fine-grained-activation-offloading --offload-modules"
    ),
    "weights of a normal AdamW: decay is decoupled from the gradient": "--no-decoupled-weight-decay",
}

# How the names of a whole kind begin -> the beginning of its reason above.
_KINDS: dict[str, str] = {
    "--fp8 --fp4 --no-fp8 --first-last-layers-bf16 --num-layers-at-start-in-bf16 --num-layers-at-end-in-bf16 "
    "--te-precision --kitchen- --use-kitchen --quant --modelopt- --reuse-grad-buf-for-mxfp8 "
    "--keep-fp8-transpose-cache": "FP8 and FP4",
    "--cuda-graph-": "CUDA graphs",
    "--mup-": "muP",
    "--error-injection-": "the self test",
    "--fim-": "fill-in-the-middle",
    "--moe- --num-moe- --expert- --shared-expert": "mixture of experts",
    "--mla-": "multi-latent",
    "--vision- --dino- --image- --video- --audio- --sound- --img- --language-model- --mimo- "
    "--multimodal-": "multimodal",
    "--bert- --retro- --ict- --biencoder- --retriever- --encoder- --t5-": "encoder models",
    "--inference- --prompt-": "inference",
    "--rl- --grpo- --langrl- --ppo- --dpo-": "reinforcement",
    "--sft- --kd- --teacher- --export- --lora- --peft- --logits-save- --logits-load-": "instruction",
    "--mamba- --hybrid- --ssm- --rwkv-": "state-space",
    "--mtp-": "multi-token",
    "--relative-attention- --alibi": "relative positions",
    "--linear-attention --linear-key --linear-value --linear-num --linear-conv --experimental-attention --dsa- "
    "--sparse-": "sparse and linear",
    "--optimizer-offload --cpu-offloading": "use --fsdp-cpu-offload",
    "--non-persistent-": "use --save-interval",
    "--muon-": "Muon",
    "--deepspeed --ds-": "DeepSpeed",
}


def _read_accepted() -> dict[str, Accepted]:
    accepted = {}
    for reason, text in _ACCEPTED.items():
        for word in text.split():
            name, equals, rest = word.partition("=")
            nargs = 0 if not equals else rest if rest in ("+", "*") else 1
            values = tuple(rest.split("|")) if nargs == 1 and rest else None
            accepted[name] = Accepted(nargs, reason, values)
    return accepted


ACCEPTED: dict[str, Accepted] = _read_accepted()
REFUSED: dict[str, str] = {name: reason for reason, names in _REFUSED.items() for name in names.split()}
REFUSED_KINDS: tuple[tuple[str, str], ...] = tuple(
    (prefix, next(reason for reason in _REFUSED if reason.startswith(start)))
    for prefixes, start in _KINDS.items()
    for prefix in prefixes.split()
)


def why_refused(name: str) -> str | None:
    """Why a flag is refused and what to use instead; None for a flag that is not known to be refused."""
    if name in REFUSED:
        return REFUSED[name]
    return next((reason for prefix, reason in REFUSED_KINDS if name.startswith(prefix)), None)
