#!/usr/bin/env bash
# The whole road on a laptop, no GPU, no network but the package registry:
#   text -> tokenizer -> tokens -> FSDP + interleaved pipeline training -> checkpoint -> resume -> Hugging Face model
#
#   bash examples/quickstart.sh            under 10 minutes on 2 cores
#   bash examples/quickstart.sh --quick    the same road in under 2 minutes
#   bash examples/quickstart.sh --experts  the same road with a mixture of experts; --quick goes with it
#   RUN=DIR bash examples/quickstart.sh    work in DIR instead of runs/quickstart
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
cd "$ROOT"
STARTED=$SECONDS

QUICK=false
EXPERTS=false
NAME=quickstart
for WORD in "$@"; do
    case "$WORD" in
        --quick) QUICK=true ;;
        --experts) EXPERTS=true NAME=quickstart-experts ;;
        *) echo "error: '$WORD' is no flag of quickstart.sh, wanted --quick, --experts or nothing" >&2; exit 2 ;;
    esac
done

if $QUICK; then
    RUN="${RUN:-runs/$NAME-quick}"
    CORPUS=(--megabytes 10)
    TOKENIZER=(--vocab-size 4096 --sample-megabytes 2)
    MODEL=(--num-layers 4 --hidden-size 128 --ffn-hidden-size 344 --num-attention-heads 4 --num-query-groups 2)
    BATCH=(--micro-batch-size 1 --global-batch-size 16 --seq-length 128 --max-position-embeddings 128)
    ITERATIONS=40
    LEARNING_RATE=4e-3
else
    RUN="${RUN:-runs/$NAME}"
    CORPUS=(--megabytes 12)
    TOKENIZER=(--vocab-size 4096)
    MODEL=(--num-layers 8 --hidden-size 192 --ffn-hidden-size 512 --num-attention-heads 6 --num-query-groups 2)
    BATCH=(--micro-batch-size 2 --global-batch-size 16 --seq-length 256 --max-position-embeddings 256)
    ITERATIONS=120
    LEARNING_RATE=3e-3
fi
HALF=$((ITERATIONS / 2))

say() { printf '\n=== %s\n' "$*"; }
run() { echo "+ $*"; "$@"; }

rm -rf "$RUN"
mkdir -p "$RUN"

say "1. A corpus: the sources and docstrings of Python's standard library"
run python data_prep/sample_corpus.py --output "$RUN/corpus.jsonl" "${CORPUS[@]}"

say "2. A tokenizer: SentencePiece BPE"
run python data_prep/train_tokenizer.py --input "$RUN/corpus.jsonl" --output "$RUN/tokenizer.model" "${TOKENIZER[@]}"

say "3. Tokens: Megatron's indexed format"
run python data_prep/preprocess_data.py --input "$RUN/corpus.jsonl" --output-prefix "$RUN/corpus" \
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$RUN/tokenizer.model" --append-eod --workers 2

MODEL+=(
    --swiglu --normalization RMSNorm --position-embedding-type rope --group-query-attention
    --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0.0 --attention-dropout 0.0
)
if $EXPERTS; then
    MODEL+=(--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01)
fi
PARALLEL=(
    --device cpu --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
)
SHARDED="FSDP over 2"
if $EXPERTS; then
    PARALLEL+=(--expert-model-parallel-size 2)
    SHARDED="FSDP and experts over 2"
fi
TRAINING=(
    "${BATCH[@]}" --train-iters "$ITERATIONS" --lr "$LEARNING_RATE" --min-lr 3e-4 --lr-decay-style cosine
    --lr-warmup-fraction 0.1 --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
)
DATA=(
    --data-path "$RUN/corpus_text_document" --split 949,50,1 --num-workers 1
    --tokenizer-type SentencePieceTokenizer --tokenizer-model "$RUN/tokenizer.model"
)
OUTPUT=(
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval "$HALF"
    --eval-interval "$HALF" --eval-iters 4
    --log-interval 5 --log-throughput --wandb-project "$NAME" --wandb-save-dir "$RUN"
)

say "4. Training to iteration $HALF: 4 processes, 2 pipeline ranks x 2 chunks (interleaved 1F1B), $SHARDED"
export OMP_NUM_THREADS=1
run torchrun --nproc-per-node 4 pretrain_gpt.py \
    "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}" --exit-interval "$HALF"

say "5. Starting again from the checkpoint, to iteration $ITERATIONS"
run torchrun --nproc-per-node 4 pretrain_gpt.py \
    "${MODEL[@]}" "${PARALLEL[@]}" "${TRAINING[@]}" "${DATA[@]}" "${OUTPUT[@]}"

PROMPT="    def __init__(self"
EXPORTED="$RUN/hf"
say "6. A Hugging Face model, checked against the trained one"
run python tools/hf_export.py --load "$RUN/checkpoints" --output "$EXPORTED"

say "7. Text from the exported model, by transformers"
run python examples/sample_text.py "$EXPORTED" --prompt "$PROMPT"

say "8. What came out"
python data_prep/inspect_data.py "$RUN/corpus_text_document" --samples 0 --unigram-loss --split 949,50,1 | grep unigram
python examples/show_losses.py "$RUN/checkpoints/metrics.jsonl"
cat <<EOT
corpus, tokenizer, tokens   $RUN/corpus.jsonl, tokenizer.model, corpus_text_document.bin/.idx
checkpoints, metrics        $RUN/checkpoints, $RUN/checkpoints/metrics.jsonl
wandb (offline)             $RUN/wandb
Hugging Face model          $EXPORTED
total time                  $((SECONDS - STARTED)) s
EOT
