#!/usr/bin/env bash
#SBATCH --job-name=megatron_lite
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Several nodes under Slurm: the pipeline crosses nodes, FSDP stays inside them. Five minutes before the time limit
# Slurm sends SIGTERM: the run saves and stops, and a requeued job goes on from there. A rank that dies restarts the
# run up to three times from the newest checkpoint.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"

DATA="${DATA:?set DATA to the prefix of your .bin/.idx files}"
TOKENIZER="${TOKENIZER:?set TOKENIZER to a SentencePiece .model file}"
SAVE="${SAVE:-runs/slurm}"
NODES="${SLURM_JOB_NUM_NODES:-1}"
HEAD="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"

MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --max-position-embeddings 8192 --rotary-base 500000
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
)
PARALLEL_ARGS=(
    --pipeline-model-parallel-size "$NODES" --num-virtual-stages-per-pipeline-rank 2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --distributed-timeout-minutes 15
)
TRAINING_ARGS=(
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 256 --train-iters 100000 --bf16
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-iters 2000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0 --cross-entropy-loss-fusion
)
DATA_ARGS=(--data-path "$DATA" --split 990,9,1 --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER")
LOGGING_ARGS=(
    --save "$SAVE" --load "$SAVE" --save-interval 500 --keep-last 3 --async-save --eval-interval 1000 --eval-iters 20
    --log-interval 10 --log-throughput --exit-signal-handler
)

srun torchrun --nnodes "$NODES" --nproc-per-node 8 --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:29500" --rdzv-id "$SLURM_JOB_ID" pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@"
