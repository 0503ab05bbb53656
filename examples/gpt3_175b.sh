#!/usr/bin/env bash
# GPT-3 175B with Megatron-LM's flags, as its public script gives them; --sequence-parallel is added: without it the
# pipeline's receive buffers of 1,536 microbatches do not fit. Planned for 16 nodes of 8 x H100 80GB.
# Start it on every node, with MASTER_ADDR (and where they cannot agree NODE_RANK), or by srun on each.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA="${DATA:?set DATA to the prefix of your .bin/.idx files}"
VOCAB_FILE="${VOCAB_FILE:?set VOCAB_FILE to GPT-2's vocab.json}"
MERGE_FILE="${MERGE_FILE:?set MERGE_FILE to GPT-2's merges.txt}"
SAVE="${SAVE:-runs/gpt3_175b}"

NUM_NODES="${NUM_NODES:-16}"
source examples/torchrun.sh
DISTRIBUTED_ARGS=(--nproc-per-node 8 "${TORCHRUN_ARGS[@]}")
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 1.0
    --bf16
    --lr 6.0e-5
    --lr-decay-style cosine
    --min-lr 6.0e-6
    --lr-warmup-fraction .001
    --lr-decay-iters 430000
)
MODEL_PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 16
    --sequence-parallel
)
DATA_ARGS=(
    --data-path "$DATA"
    --vocab-file "$VOCAB_FILE"
    --merge-file "$MERGE_FILE"
    --tokenizer-type GPT2BPETokenizer
    --split 949,50,1
)
EVAL_AND_LOGGING_ARGS=(
    --log-interval 100
    --save-interval 10000
    --eval-interval 1000
    --save "$SAVE"
    --load "$SAVE"
    --eval-iters 10
    --tensorboard-dir "$SAVE/tensorboard"
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" pretrain_gpt.py "${GPT_MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" \
    "${MODEL_PARALLEL_ARGS[@]}" "${DATA_ARGS[@]}" "${EVAL_AND_LOGGING_ARGS[@]}" "$@"
