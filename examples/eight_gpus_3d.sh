#!/usr/bin/env bash
# Eight GPUs in three dimensions: 2 tensor x 2 pipeline x 2 FSDP. Planned for H100 80GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA="${DATA:?set DATA to the prefix of your .bin/.idx files}"
TOKENIZER="${TOKENIZER:?set TOKENIZER to a SentencePiece .model file}"
SAVE="${SAVE:-runs/eight_gpus_3d}"
source examples/torchrun.sh

MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --max-position-embeddings 8192 --rotary-base 500000
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 2 --sequence-parallel
    --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
)
TRAINING_ARGS=(
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 64 --train-iters 50000 --bf16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 1000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
)
DATA_ARGS=(--data-path "$DATA" --split 990,9,1 --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER")
LOGGING_ARGS=(
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --keep-last 3 --async-save --eval-interval 500 --eval-iters 20
    --log-interval 10 --log-throughput --exit-signal-handler
)

exec torchrun --nproc-per-node 8 "${TORCHRUN_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
