#!/usr/bin/env bash
# Eight GPUs: 4 pipeline ranks x 2 chunks (interleaved 1F1B), FSDP over 2. The layout for several nodes, at the size
# of one: check it first with  torchrun --nproc-per-node 8 tools/verify_parity.py  and these flags. Planned for
# H100 80GB.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

DATA="${DATA:?set DATA to the prefix of your .bin/.idx files}"
TOKENIZER="${TOKENIZER:?set TOKENIZER to a SentencePiece .model file}"
SAVE="${SAVE:-runs/eight_gpus_pipeline}"
source examples/torchrun.sh

MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --max-position-embeddings 4096
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
)
PARALLEL_ARGS=(
    --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2
    --recompute-granularity selective
)
TRAINING_ARGS=(
    --seq-length 4096 --micro-batch-size 1 --global-batch-size 128 --train-iters 50000 --bf16
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 1000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --cross-entropy-loss-fusion
)
DATA_ARGS=(--data-path "$DATA" --split 990,9,1 --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER")
LOGGING_ARGS=(
    --save "$SAVE" --load "$SAVE" --save-interval 1000 --keep-last 3 --async-save --eval-interval 500 --eval-iters 20
    --log-interval 10 --log-throughput --exit-signal-handler
)

exec torchrun --nproc-per-node 8 "${TORCHRUN_ARGS[@]}" pretrain_gpt.py "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
