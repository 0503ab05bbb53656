#!/usr/bin/env bash
# A laptop without a GPU: one process, a 10M-parameter Llama-style model.
# Data: run examples/quickstart.sh first, or set DATA and TOKENIZER.
# --check in the arguments prints the resolved run and stops.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA="${DATA:-runs/quickstart/corpus_text_document}"
TOKENIZER="${TOKENIZER:-runs/quickstart/tokenizer.model}"
SAVE="${SAVE:-runs/laptop}"

MODEL_ARGS=(
    --num-layers 6 --hidden-size 256 --ffn-hidden-size 688 --num-attention-heads 8
    --group-query-attention --num-query-groups 4 --max-position-embeddings 256
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
)
TRAINING_ARGS=(
    --seq-length 256 --micro-batch-size 4 --global-batch-size 16 --train-iters 500
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-iters 50
    --weight-decay 0.1 --adam-beta2 0.95
)
DATA_ARGS=(
    --data-path "$DATA" --split 949,50,1
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
)
LOGGING_ARGS=(
    --save "$SAVE" --load "$SAVE" --save-interval 100 --eval-interval 100 --eval-iters 5
    --log-interval 10 --log-throughput --device cpu
)

exec python pretrain_gpt.py "${MODEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
