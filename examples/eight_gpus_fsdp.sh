#!/usr/bin/env bash
# Eight GPUs in one node, FSDP alone: a 1.3B-parameter model. Planned for A100 80GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA="${DATA:?set DATA to the prefix of your .bin/.idx files}"
TOKENIZER="${TOKENIZER:?set TOKENIZER to a SentencePiece .model file}"
SAVE="${SAVE:-runs/eight_gpus_fsdp}"
source examples/torchrun.sh

MODEL_ARGS=(
    --num-layers 24 --hidden-size 2048 --ffn-hidden-size 5504 --num-attention-heads 16 --max-position-embeddings 4096
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
)
TRAINING_ARGS=(
    --seq-length 4096 --micro-batch-size 2 --global-batch-size 256 --train-iters 50000 --bf16 --compile
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 1000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --cross-entropy-loss-fusion
)
DATA_ARGS=(--data-path "$DATA" --split 990,9,1 --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER")
LOGGING_ARGS=(
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --keep-last 3 --async-save --eval-interval 500 --eval-iters 20
    --log-interval 10 --log-throughput --exit-signal-handler
)

exec torchrun --nproc-per-node 8 "${TORCHRUN_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
