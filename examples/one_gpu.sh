#!/usr/bin/env bash
# One GPU: a 125M-parameter model in bf16 with torch.compile. Planned for A100 80GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA="${DATA:?set DATA to the prefix of your .bin/.idx files}"
TOKENIZER="${TOKENIZER:?set TOKENIZER to a SentencePiece .model file}"
SAVE="${SAVE:-runs/one_gpu}"
source examples/torchrun.sh

MODEL_ARGS=(
    --num-layers 12 --hidden-size 768 --num-attention-heads 12 --max-position-embeddings 2048
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --hidden-dropout 0.0 --attention-dropout 0.0
)
TRAINING_ARGS=(
    --seq-length 2048 --micro-batch-size 8 --global-batch-size 256 --train-iters 10000 --bf16 --compile
    --lr 6e-4 --min-lr 6e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --cross-entropy-loss-fusion
)
DATA_ARGS=(--data-path "$DATA" --split 990,9,1 --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER")
LOGGING_ARGS=(
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --keep-last 3 --eval-interval 500 --eval-iters 20
    --log-interval 10 --log-throughput --exit-signal-handler
)

exec torchrun --nproc-per-node 1 "${TORCHRUN_ARGS[@]}" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
