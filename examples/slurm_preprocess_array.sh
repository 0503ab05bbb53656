#!/usr/bin/env bash
#SBATCH --job-name=preprocess
#SBATCH --array=0-31
#SBATCH --cpus-per-task=32
#SBATCH --mem=48G
#SBATCH --time=12:00:00
#SBATCH --requeue
# A corpus that is too large for one machine, as independent jobs: each tokenizes one shard of the input. A requeued
# job goes on where it was stopped. When all are done, merge them; the result is what one job would have written:
#
#   python data_prep/merge_datasets.py --input "$OUTPUT" --output-prefix "$OUTPUT/../corpus_text_document"
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}"

INPUT="${INPUT:?set INPUT to files, folders or glob patterns}"
OUTPUT="${OUTPUT:?set OUTPUT to a folder for the shards}"
TOKENIZER="${TOKENIZER:?set TOKENIZER to a SentencePiece .model file}"
SHARD="${SLURM_ARRAY_TASK_ID:-0}"
NUM_SHARDS="${SLURM_ARRAY_TASK_COUNT:-1}"
WORKERS="${SLURM_CPUS_PER_TASK:-$(nproc)}"

# exec: the signal that a scheduler sends reaches python itself. INPUT stays unquoted: it may be several words.
# shellcheck disable=SC2086
exec python data_prep/preprocess_data.py --input $INPUT --output-prefix "$OUTPUT/corpus" \
    --num-shards "$NUM_SHARDS" --shard-id "$SHARD" --resume --append-eod --workers "$WORKERS" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$TOKENIZER"
