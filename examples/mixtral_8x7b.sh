#!/usr/bin/env bash
# Mixtral 8x7B with Megatron-LM's flags, as its public script gives them: 64 GPUs, pp 4 x ep 8.
# Planned for H100 80GB. MASTER_ADDR the same on each of NUM_NODES.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA="${DATA:?set DATA to the prefix of your .bin/.idx files}"
TOKENIZER="${TOKENIZER:?set TOKENIZER to the Hugging Face folder of the tokenizer}"
SAVE="${SAVE:-runs/mixtral_8x7b}"

NUM_NODES="${NUM_NODES:-8}"
source examples/torchrun.sh
DISTRIBUTED_ARGS=(--nproc-per-node "${GPUS_PER_NODE:-8}" "${TORCHRUN_ARGS[@]}")
MODEL_ARGS=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --init-method-std 0.01
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --rotary-base 1000000
    --swiglu
    --untie-embeddings-and-output-weights
)
MOE_ARGS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 256
    --train-iters 500000
    --lr 1e-4
    --min-lr 1.0e-5
    --lr-decay-iters 320000
    --lr-decay-style cosine
    --lr-warmup-iters 500
    --weight-decay 0.1
    --clip-grad 1.0
    --bf16
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --recompute-granularity selective
    --recompute-modules moe layernorm
)
DATA_ARGS=(
    --data-path "$DATA"
    --tokenizer-type HuggingFaceTokenizer
    --tokenizer-model "$TOKENIZER"
    --split 99990,8,2
)
LOGGING_ARGS=(
    --log-interval 1
    --eval-interval 1000
    --eval-iters 10
    --save-interval 1000
    --save "$SAVE"
    --load "$SAVE"
    --tensorboard-dir "$SAVE/tensorboard"
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${MOE_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
