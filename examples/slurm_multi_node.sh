#!/usr/bin/env bash
#SBATCH --job-name=megatron_lite
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# Several nodes under Slurm: tensor parallelism inside a node, the pipeline across four, FSDP across more (a multiple
# of 4). Planned for H100 80GB. Five minutes before the time limit Slurm sends SIGTERM to this script, which passes it
# on: the run saves and stops, and the job goes back into the queue, to go on from there. A rank that dies restarts
# the run up to three times from the newest checkpoint.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"

DATA="${DATA:?set DATA to the prefix of your .bin/.idx files}"
TOKENIZER="${TOKENIZER:?set TOKENIZER to a SentencePiece .model file}"
SAVE="${SAVE:-runs/slurm}"
NUM_NODES="${SLURM_JOB_NUM_NODES:-1}"
source examples/torchrun.sh

MODEL_ARGS=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8 --max-position-embeddings 8192 --rotary-base 500000
    --swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
    --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2
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

STOPPED=false
stop() {
    STOPPED=true
    trap '' TERM USR1
    scancel --signal=TERM "$SLURM_JOB_ID" || true # to the steps, which are torchrun's, not to this script
}
trap stop TERM USR1

srun torchrun --nproc-per-node 8 "${TORCHRUN_ARGS[@]}" --max-restarts 3 pretrain_gpt.py \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${TRAINING_ARGS[@]}" "${DATA_ARGS[@]}" "${LOGGING_ARGS[@]}" "$@" &
STEP=$!
CODE=0
wait "$STEP" || CODE=$?
if $STOPPED; then # the signal ended the first wait
    CODE=0
    wait "$STEP" || CODE=$?
    # A job that is being cancelled is not RUNNING any more, and is not wanted back.
    STATE="$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T 2>/dev/null || echo RUNNING)"
    [[ "$STATE" != RUNNING ]] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$CODE"
