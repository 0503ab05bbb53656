"""Flag sets of pretraining scripts as they are found in public, dense ones and mixtures of experts: old and new
spellings, quotes that survive the shell, everything that a script of its time carries.

SCRIPTS: name -> (processes, words as the program gets them).
"""

LLAMA = """--use-mcore-models --normalization RMSNorm --position-embedding-type rope --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0.0 --hidden-dropout 0 --no-masked-softmax-fusion
    --no-position-embedding --attention-softmax-in-fp32 --bf16 --use-flash-attn --init-method-std 0.02
    --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --weight-decay 1e-1 --lr-decay-style cosine"""
OLD_GPT = """--data-impl mmap --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt
    --data-path my-gpt2_text_document --split 949,50,1 --distributed-backend nccl --fp16 --DDP-impl local
    --local_rank 0"""
CI = """--log-params-norm --log-num-zeros-in-grad --log-validation-ppl-to-tensorboard --log-timers-to-tensorboard
    --log-memory-to-tensorboard --timing-log-level 0 --deterministic-mode --no-gradient-accumulation-fusion
    --use-persistent-ckpt-worker --dist-ckpt-strictness log_all --ckpt-format torch_dist --async-save
    --data-cache-path /workspace/cache --tensorboard-dir /tb --save /ckpt --load /ckpt --save-interval 50
    --attention-softmax-in-fp32 --use-checkpoint-opt_param-scheduler --use-mcore-models
    --transformer-impl transformer_engine --attention-backend unfused --vocab-file bpe/vocab.json
    --merge-file bpe/merges.txt --data-path the_pile/shard00/my-gpt3_00_text_document --split 949,50,1
    --distributed-backend nccl --clip-grad 1.0 --lr 0.00015 --lr-decay-style cosine --min-lr 1.0e-5
    --weight-decay 1e-2 --lr-warmup-fraction .01 --log-interval 1 --eval-interval 1000 --eval-iters 10
    --num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024
    --micro-batch-size 4 --global-batch-size 32 --train-iters 50 --lr-decay-iters 320000 --bf16"""

SCRIPTS: dict[str, tuple[int, str]] = {
    "gpt2_small": (
        1,
        f"""--num-layers 12 --hidden-size 768 --num-attention-heads 12 --seq-length 1024
        --max-position-embeddings 1024 --batch-size 8 --train-iters 320000 --lr-decay-iters 320000 --lr 0.00015
        --min-lr 1.0e-5 --lr-decay-style cosine --warmup .01 --weight-decay 1e-2 --clip-grad 1.0 --log-interval 100
        --save-interval 10000 --eval-interval 1000 --eval-iters 10 --checkpoint-activations --save ckpt --load ckpt
        {OLD_GPT}""",
    ),
    "gpt3_345m": (
        1,
        """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
        --micro-batch-size 4 --global-batch-size 8 --lr 0.00015 --train-iters 500000 --lr-decay-iters 320000
        --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --lr-warmup-fraction .01 --clip-grad 1.0 --fp16
        --data-path my-gpt2_text_document --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --split 949,50,1
        --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --save ckpt --load ckpt""",
    ),
    "gpt3_345m_data_parallel": (
        8,
        f"""--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 8 --global-batch-size 64
        --seq-length 1024 --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 --lr 0.00015
        --lr-decay-style cosine --min-lr 1.0e-5 --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01
        --activations-checkpoint-method uniform --log-interval 100 --save-interval 10000 --eval-interval 1000
        --eval-iters 10 --save ckpt --load ckpt {OLD_GPT}""",
    ),
    "gpt3_345m_model_parallel": (
        8,
        f"""--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 24
        --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 16 --seq-length 1024
        --max-position-embeddings 1024 --train-iters 500000 --lr-decay-iters 320000 --lr 0.00015 --min-lr 1.0e-5
        --lr-decay-style cosine --weight-decay 1e-2 --clip-grad 1.0 --lr-warmup-fraction .01 --log-interval 100
        --save-interval 10000 --eval-interval 1000 --eval-iters 10 {OLD_GPT}""",
    ),
    "gpt3_1.3b": (
        16,
        """--tensor-model-parallel-size 2 --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --seq-length 2048
        --max-position-embeddings 2048 --micro-batch-size 8 --global-batch-size 512 --train-samples 146484375
        --lr-warmup-samples 183105 --lr-decay-samples 126953125 --lr 2.0e-4 --min-lr 2.0e-5 --lr-decay-style cosine
        --bf16 --use-flash-attn --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model /data/tok.model
        --data-path 0.4 /data/cc_text_document 0.35 /data/books_text_document 0.25 /data/wiki_text_document
        --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.0134
        --log-interval 10 --save-interval 2000 --eval-interval 200 --eval-iters 50 --log-params-norm
        --log-num-zeros-in-grad --tensorboard-dir /tb --exit-duration-in-mins 230 --save /ckpt --load /ckpt
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --distributed-timeout-minutes 60""",
    ),
    "gpt3_175b_2021": (
        1024,
        """--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16 --num-layers 96 --hidden-size 12288
        --num-attention-heads 96 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
        --global-batch-size 1536 --rampup-batch-size 16 16 5859375 --train-samples 146484375
        --lr-decay-samples 126953125 --lr-warmup-samples 183105 --lr 6.0e-5 --min-lr 6.0e-6 --lr-decay-style cosine
        --log-interval 10 --eval-iters 40 --eval-interval 1000 --data-path my-gpt3_text_document
        --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --save-interval 1000 --save ckpt --load ckpt
        --split 98,2,0 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --init-method-std 0.006
        --tensorboard-dir tb --fp16 --activations-checkpoint-method uniform""",
    ),
    "gpt3_175b": (
        128,
        """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
        --max-position-embeddings 2048 --attention-backend auto --micro-batch-size 1 --global-batch-size 1536
        --rampup-batch-size 16 16 5859375 --train-iters 500000 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
        --init-method-std 0.006 --clip-grad 1.0 --fp16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
        --lr-warmup-fraction .001 --lr-decay-iters 430000 --tensor-model-parallel-size 8
        --pipeline-model-parallel-size 16 --data-path my-gpt3_text_document --vocab-file vocab.json
        --merge-file merges.txt --split 949,50,1 --log-interval 100 --save-interval 10000 --eval-interval 1000
        --save ckpt --load ckpt --eval-iters 10 --tensorboard-dir tb""",
    ),
    "gpt3_175b_interleaved": (
        1024,
        """--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048
        --max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1024 --train-samples 51200000
        --bf16 --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6 --lr-warmup-samples 100000
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --sequence-parallel
        --num-layers-per-virtual-pipeline-stage 2 --recompute-activations --use-distributed-optimizer
        --overlap-grad-reduce --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt
        --data-path d_text_document --split 969,30,1 --log-interval 10 --eval-iters 20 --eval-interval 500
        --hidden-dropout 0.0 --attention-dropout 0.0 --no-bias-gelu-fusion --manual-gc --manual-gc-interval 10""",
    ),
    "llama1_65b": (
        512,
        f"""{LLAMA} --num-layers 80 --hidden-size 8192 --ffn-hidden-size 22016 --num-attention-heads 64
        --seq-length 2048 --max-position-embeddings 2048 --tensor-model-parallel-size 8
        --pipeline-model-parallel-size 8 --sequence-parallel --micro-batch-size 1 --global-batch-size 2048
        --train-iters 340000 --lr 1.5e-4 --min-lr 1.5e-5 --lr-warmup-iters 2000 --norm-epsilon 1e-5
        --recompute-granularity full --recompute-method block --recompute-num-layers 2 --use-distributed-optimizer
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --data-path d --split 99,1,0
        --make-vocab-size-divisible-by 1 --vocab-size 32000""",
    ),
    "llama2_7b": (
        8,
        f"""{LLAMA} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --num-layers 32
        --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 4096
        --max-position-embeddings 4096 --micro-batch-size 2 --global-batch-size 256 --lr 1.25e-6 --min-lr 1.25e-7
        --train-iters 5000 --lr-warmup-fraction 0.01 --lr-warmup-init 0 --initial-loss-scale 65536
        --tokenizer-type Llama2Tokenizer --tokenizer-model ./tokenizer.model --make-vocab-size-divisible-by 1
        --norm-epsilon 1e-5 --no-load-optim --no-load-rng --use-distributed-optimizer --use-rotary-position-embeddings
        --data-path ./alpaca_text_document --split 949,50,1 --log-interval 1 --save-interval 10000
        --eval-interval 1000 --eval-iters 10 --load model --save ckpt --vocab-size 32000""",
    ),
    "llama2_13b": (
        16,
        f"""{LLAMA} --tensor-model-parallel-size 8 --sequence-parallel --num-layers 40 --hidden-size 5120
        --ffn-hidden-size 13824 --num-attention-heads 40 --seq-length 4096 --max-position-embeddings 4096
        --micro-batch-size 4 --global-batch-size 512 --lr 3e-4 --min-lr 3e-5 --train-iters 500000
        --lr-warmup-iters 2000 --tokenizer-type Llama2Tokenizer --tokenizer-model "/models/llama2/tokenizer.model"
        --make-vocab-size-divisible-by 1 --vocab-size 32000 --data-path '/data/pile_text_document'
        --split '990,8,2'""",
    ),
    "llama2_70b": (
        256,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 80 --hidden-size 8192
        --ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096
        --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 5
        --sequence-parallel --micro-batch-size 1 --global-batch-size 1024 --lr 1.5e-4 --min-lr 1.5e-5
        --train-iters 500000 --lr-warmup-iters 2000 --no-gradient-accumulation-fusion --tp-comm-overlap
        --overlap-grad-reduce --overlap-param-gather --use-distributed-optimizer --tokenizer-type Llama2Tokenizer
        --tokenizer-model t.model --data-path d --split 98,2,0 --exit-signal-handler --vocab-size 32000
        --make-vocab-size-divisible-by 1""",
    ),
    "llama3_8b": (
        8,
        """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
        --group-query-attention --num-query-groups 8 --kv-channels 128 --seq-length 8192
        --max-position-embeddings 8192 --position-embedding-type rope --rotary-base 1000000 --rotary-percent 1.0
        --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --init-method-std 0.0134 --attention-backend fused
        --apply-layernorm-1p --untie-embeddings-and-output-weights --disable-bias-linear --micro-batch-size 1
        --global-batch-size 128 --train-samples 1953125000 --lr-decay-samples 1949218748 --lr-warmup-samples 3906252
        --lr 0.00015 --min-lr 0.00001 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5 --lr-decay-style cosine
        --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --bf16 --grad-reduce-in-bf16
        --cross-entropy-loss-fusion --calculate-per-token-loss --manual-gc --empty-unused-memory-level 1
        --tensor-model-parallel-size 1 --context-parallel-size 2 --sequence-parallel --use-distributed-optimizer
        --overlap-grad-reduce --overlap-param-gather --mock-data --tokenizer-type NullTokenizer --vocab-size 128256
        --data-cache-path cache --tiktoken-pattern v2 --split '99,1,0' --no-create-attention-mask-in-dataloader
        --no-mmap-bin-files --num-workers 1 --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000
        --log-throughput --profile --profile-step-start 4 --profile-step-end 6 --ckpt-format torch_dist
        --distributed-timeout-minutes 60 --save ckpt --load ckpt --tensorboard-dir tb""",
    ),
    "llama3_8b_rmsnorm": (
        64,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 32 --hidden-size 4096
        --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 131072
        --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0 --tensor-model-parallel-size 4
        --context-parallel-size 2 --cp-comm-type p2p --sequence-parallel --micro-batch-size 1 --global-batch-size 512
        --train-iters 100000 --lr 3e-4 --min-lr 3e-5 --lr-warmup-iters 2000
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Meta-Llama-3-8B --data-path d
        --split 100,0,0 --wandb-project llama --wandb-exp-name 8b --wandb-save-dir wandb --vocab-size 128256""",
    ),
    "llama3_70b": (
        256,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 80 --hidden-size 8192
        --ffn-hidden-size 28672 --num-attention-heads 64 --seq-length 8192 --max-position-embeddings 8192
        --rotary-base 500000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
        --num-virtual-stages-per-pipeline-rank 5 --sequence-parallel --micro-batch-size 1 --global-batch-size 512
        --train-samples 600000000 --lr 1.5e-4 --min-lr 1.5e-6 --lr-warmup-samples 1000000
        --recompute-granularity selective --tokenizer-type HuggingFaceTokenizer --tokenizer-model /tok
        --data-args-path blend.txt --split 999,1,0 --vocab-size 128256 --overlap-p2p-communication-warmup-flush
        --microbatch-group-size-per-virtual-pipeline-stage 8 --defer-embedding-wgrad-compute
        --wgrad-deferral-limit 22""",
    ),
    "llama3_405b": (
        2304,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 126 --hidden-size 16384
        --ffn-hidden-size 53248 --num-attention-heads 128 --seq-length 8192 --max-position-embeddings 8192
        --rotary-base 500000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 9
        --num-virtual-stages-per-pipeline-rank 7 --account-for-embedding-in-pipeline-split
        --account-for-loss-in-pipeline-split --sequence-parallel --micro-batch-size 1 --global-batch-size 1152
        --train-iters 1200000 --lr 8e-5 --min-lr 8e-7 --lr-warmup-iters 8000 --mock-data --vocab-size 128256
        --tokenizer-type NullTokenizer --nccl-communicator-config-path nccl.yaml --use-tp-pp-dp-mapping""",
    ),
    "llama3.2_1b": (
        8,
        f"""{LLAMA.replace("--untie-embeddings-and-output-weights", "")} --group-query-attention --num-query-groups 8
        --num-layers 16 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 32 --seq-length 4096
        --max-position-embeddings 131072 --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32
        --micro-batch-size 4 --global-batch-size 256 --train-iters 50000 --lr 5e-4 --min-lr 5e-5
        --lr-warmup-iters 500 --use-torch-fsdp2 --no-gradient-accumulation-fusion --ckpt-format torch_dcp
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model t --data-path d --split 98,1,1 --vocab-size 128256""",
    ),
    "mistral_7b": (
        32,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 32 --hidden-size 4096
        --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 32768
        --window-size 4096,0 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel
        --micro-batch-size 1 --global-batch-size 256 --train-iters 20000 --lr 1e-4 --min-lr 1e-5
        --lr-warmup-iters 500 --tokenizer-type Llama2Tokenizer --tokenizer-model mistral/tokenizer.model
        --data-path 1.0 d --split 99,1,0 --vocab-size 32000""",
    ),
    "mistral_nemo_12b": (
        32,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --kv-channels 128 --num-layers 40 --hidden-size 5120
        --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 8192 --max-position-embeddings 131072
        --rotary-base 1000000 --tensor-model-parallel-size 4 --sequence-parallel --micro-batch-size 1
        --global-batch-size 256 --train-iters 20000 --lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 500
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model nemo --data-path d --split 99,1,0
        --vocab-size 131072""",
    ),
    "qwen2_7b": (
        16,
        f"""{LLAMA} --add-qkv-bias --group-query-attention --num-query-groups 4 --num-layers 28 --hidden-size 3584
        --ffn-hidden-size 18944 --num-attention-heads 28 --seq-length 4096 --max-position-embeddings 131072
        --rotary-base 1000000 --norm-epsilon 1e-6 --tensor-model-parallel-size 4 --sequence-parallel
        --micro-batch-size 1 --global-batch-size 512 --train-iters 100000 --lr 3e-4 --min-lr 3e-5
        --lr-warmup-iters 1000 --tokenizer-type HuggingFaceTokenizer --tokenizer-model Qwen/Qwen2-7B --data-path d
        --split 99,1,0 --vocab-size 152064 --eod-mask-loss --reset-position-ids --reset-attention-mask""",
    ),
    "qwen2.5_0.5b": (
        8,
        f"""{LLAMA.replace("--untie-embeddings-and-output-weights", "")} --add-qkv-bias --group-query-attention
        --num-query-groups 2 --num-layers 24 --hidden-size 896 --ffn-hidden-size 4864 --num-attention-heads 14
        --seq-length 4096 --max-position-embeddings 32768 --rotary-base 1000000 --norm-epsilon 1e-6
        --micro-batch-size 2 --global-batch-size 128 --train-iters 10000 --lr 3e-4 --min-lr 3e-5
        --lr-warmup-iters 100 --tokenizer-type HuggingFaceTokenizer --tokenizer-model q --data-path d
        --split 99,1,0 --vocab-size 151936""",
    ),
    "qwen2.5_72b": (
        128,
        f"""{LLAMA} --add-qkv-bias --group-query-attention --num-query-groups 8 --num-layers 80 --hidden-size 8192
        --ffn-hidden-size 29568 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 131072
        --rotary-base 1000000 --norm-epsilon 1e-6 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
        --decoder-first-pipeline-num-layers 9 --decoder-last-pipeline-num-layers 11 --sequence-parallel
        --micro-batch-size 1 --global-batch-size 512 --train-iters 10000 --lr 1e-4 --min-lr 1e-5
        --lr-warmup-iters 100 --tokenizer-type HuggingFaceTokenizer --tokenizer-model q --data-path d
        --split 99,1,0 --vocab-size 152064""",
    ),
    "qwen3_8b": (
        16,
        f"""{LLAMA} --qk-layernorm --group-query-attention --num-query-groups 8 --kv-channels 128 --num-layers 36
        --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 --seq-length 4096
        --max-position-embeddings 40960 --rotary-base 1000000 --norm-epsilon 1e-6 --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --global-batch-size 256
        --train-iters 10000 --lr 1e-4 --min-lr 1e-5 --lr-warmup-iters 100 --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model q --data-path d --split 99,1,0 --vocab-size 151936 --no-rope-fusion""",
    ),
    "qwen3_0.6b": (
        1,
        f"""{LLAMA.replace("--untie-embeddings-and-output-weights", "")} --qk-layernorm --group-query-attention
        --num-query-groups 8 --kv-channels 128 --num-layers 28 --hidden-size 1024 --ffn-hidden-size 3072
        --num-attention-heads 16 --seq-length 4096 --max-position-embeddings 40960 --rotary-base 1000000
        --norm-epsilon 1e-6 --micro-batch-size 1 --global-batch-size 64 --train-iters 10000 --lr 1e-4 --min-lr 1e-5
        --lr-warmup-iters 100 --tokenizer-type HuggingFaceTokenizer --tokenizer-model q --data-path d
        --split 99,1,0 --vocab-size 151936""",
    ),
    "tinyllama_1.1b": (
        16,
        f"""{LLAMA} --group-query-attention --num-query-groups 4 --num-layers 22 --hidden-size 2048
        --ffn-hidden-size 5632 --num-attention-heads 32 --seq-length 2048 --max-position-embeddings 2048
        --micro-batch-size 16 --global-batch-size 1024 --train-iters 1430512 --lr 4e-4 --min-lr 4e-5
        --lr-warmup-iters 2000 --tokenizer-type Llama2Tokenizer --tokenizer-model t --vocab-size 32000
        --data-path 0.7 slim_text_document 0.3 star_text_document --split 995,5,0""",
    ),
    "smollm_135m": (
        8,
        f"""{LLAMA.replace("--untie-embeddings-and-output-weights", "")} --group-query-attention --num-query-groups 3
        --num-layers 30 --hidden-size 576 --ffn-hidden-size 1536 --num-attention-heads 9 --seq-length 2048
        --max-position-embeddings 2048 --micro-batch-size 16 --global-batch-size 512 --train-iters 600000 --lr 3e-3
        --min-lr 0 --lr-warmup-iters 2000 --lr-decay-style WSD --lr-wsd-decay-style linear
        --lr-wsd-decay-iters 120000 --tokenizer-type HuggingFaceTokenizer --tokenizer-model s --data-path d
        --split 99,1,0 --vocab-size 49152""",
    ),
    "yi_34b": (
        128,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 60 --hidden-size 7168
        --ffn-hidden-size 20480 --num-attention-heads 56 --seq-length 4096 --max-position-embeddings 4096
        --rotary-base 5000000 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel
        --micro-batch-size 1 --global-batch-size 1024 --train-iters 500000 --lr 1e-4 --min-lr 1e-5
        --lr-warmup-iters 2000 --tokenizer-type SentencePieceTokenizer --tokenizer-model y --data-path d
        --split 99,1,0 --vocab-size 64000""",
    ),
    "codellama_34b": (
        64,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 48 --hidden-size 8192
        --ffn-hidden-size 22016 --num-attention-heads 64 --seq-length 16384 --max-position-embeddings 16384
        --rotary-base 1e6 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 4 --sequence-parallel
        --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 --micro-batch-size 1
        --global-batch-size 64 --train-iters 10000 --lr 2e-5 --min-lr 2e-6 --lr-warmup-iters 100 --finetune
        --load codellama --tokenizer-type Llama2Tokenizer --tokenizer-model t --data-path d --split 99,1,0
        --vocab-size 32000""",
    ),
    "deepseek_67b": (
        256,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 95 --hidden-size 8192
        --ffn-hidden-size 22016 --num-attention-heads 64 --seq-length 4096 --max-position-embeddings 4096
        --norm-epsilon 1e-6 --tensor-model-parallel-size 8 --pipeline-model-parallel-size 8
        --pipeline-model-parallel-layout Et*11|(t*12|)*6t*12L --sequence-parallel --micro-batch-size 1
        --global-batch-size 2304 --train-iters 440000 --lr 3.2e-4 --min-lr 3.2e-5 --lr-warmup-iters 2000
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model t --data-path d --split 99,1,0
        --vocab-size 102400""",
    ),
    "baichuan2_7b": (
        32,
        f"""{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
        --seq-length 4096 --max-position-embeddings 4096 --norm-epsilon 1e-6 --tensor-model-parallel-size 8
        --sequence-parallel --micro-batch-size 4 --global-batch-size 32 --train-iters 2000 --lr 1e-6 --min-lr 1e-8
        --lr-warmup-fraction 0.1 --lr-decay-style cosine --initial-loss-scale 8188.0 --seed 1234
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model b --data-path d --split 949,50,1
        --vocab-size 125696 --no-save-optim --no-save-rng""",
    ),
    "nemotron4_15b": (
        384,
        """--num-layers 32 --hidden-size 6144 --ffn-hidden-size 24576 --num-attention-heads 48 --seq-length 4096
        --max-position-embeddings 4096 --group-query-attention --num-query-groups 8 --squared-relu
        --position-embedding-type rope --rotary-percent 0.5 --normalization LayerNorm --apply-layernorm-1p
        --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
        --init-method-std 0.0134 --tensor-model-parallel-size 8 --sequence-parallel --micro-batch-size 4
        --global-batch-size 1152 --rampup-batch-size 384 384 14155776 --train-samples 1700000000
        --lr-decay-samples 1699000000 --lr-warmup-samples 1000000 --lr 4.5e-4 --min-lr 4.5e-7
        --lr-decay-style cosine --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0 --bf16
        --tokenizer-type GPTSentencePieceTokenizer --tokenizer-model nemotron_2_256k.model
        --data-path 0.5 a 0.5 b --split 99,1,0 --log-interval 10 --eval-iters 14 --eval-interval 2000
        --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap
        --exit-duration-in-mins 235 --num-workers 1 --log-straggler --straggler-minmax-count 16
        --vocab-size 256000""",
    ),
    "nemotron_8b_wsd_step_batch": (
        256,
        """--use-mcore-models --num-layers 32 --hidden-size 4096 --ffn-hidden-size 16384 --num-attention-heads 32
        --seq-length 8192 --max-position-embeddings 8192 --group-query-attention --num-query-groups 8
        --squared-relu --position-embedding-type rope --rotary-base 10000 --rotary-percent 0.5
        --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0
        --attention-dropout 0 --init-method-std 0.0134 --tensor-model-parallel-size 2 --sequence-parallel
        --micro-batch-size 2 --step-batch-size-schedule '0:768 250B:1536 500B:3072' --train-samples 244140625
        --lr-warmup-samples 1024000 --lr-decay-samples 244140625 --lr-decay-style WSD
        --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-samples 48828125 --lr 4.5e-4 --min-lr 4.5e-6
        --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 --bf16
        --tokenizer-type TikTokenizer --tokenizer-model multiMixV8.json --tiktoken-pattern v2
        --tiktoken-num-special-tokens 1000 --per-split-data-args-path blend.json --num-workers 1
        --dataloader-fast-cache-load --dataloader-defer-npy-index-mmap --no-mmap-bin-files
        --data-cache-path cache --log-interval 10 --eval-iters 14 --eval-interval 2000 --save-interval 500
        --save-retain-interval 10000 --save ckpt --load ckpt --use-distributed-optimizer --ckpt-format torch_dist
        --ckpt-fully-parallel-save --ckpt-fully-parallel-load --ckpt-assume-constant-structure --async-save
        --log-progress --timing-log-option minmax --disable-gloo-process-groups --rerun-mode disabled
        --check-weight-hash-across-dp-replicas-interval 20000 --cross-entropy-loss-fusion
        --cross-entropy-fusion-impl native --attention-backend flash --vocab-size 131072""",
    ),
    "bloom_style_1b7": (
        16,
        """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --num-layers 24 --hidden-size 2048
        --num-attention-heads 16 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2
        --global-batch-size 512 --rampup-batch-size 192 32 9_765_625 --train-samples 220_000_000 --optimizer adam
        --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-8 --lr 2e-4 --min-lr 1e-5 --lr-decay-style cosine
        --lr-decay-samples 200_000_000 --lr-warmup-samples 183_105 --clip-grad 1.0 --weight-decay 1e-1
        --init-method-std 0.0048 --bf16 --seed 42 --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model bigscience/tokenizer --checkpoint-activations --pad-vocab-size-to 250880
        --log-interval 1 --save-interval 250 --eval-interval 1000 --eval-iters 1 --exit-duration-in-mins 5990
        --data-path d --data-impl mmap --distributed-backend nccl --split '949,50,1' --save c --load c""",
    ),
    "olmo_style_7b": (
        64,
        f"""{LLAMA} --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
        --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 2048
        --train-samples 1_200_000_000 --lr 3e-4 --min-lr 3e-5 --lr-decay-style linear --lr-warmup-samples 5120000
        --num-distributed-optimizer-instances 8 --data-parallel-sharding-strategy optim_grads
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model allenai/OLMo-7B --data-path d --split 1000,0,0
        --vocab-size 50304""",
    ),
    "neox_style_20b": (
        96,
        """--num-layers 44 --hidden-size 6144 --num-attention-heads 64 --seq-length 2048 --max-position-embeddings 2048
        --use-rotary-position-embeddings --rotary-percent 0.25 --no-position-embedding
        --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4
        --micro-batch-size 4 --global-batch-size 1536 --train-iters 150000 --lr-decay-iters 150000 --lr 0.97e-4
        --min-lr 0.97e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01 --weight-decay 0.01 --adam-beta2 0.95
        --hidden-dropout 0 --attention-dropout 0 --fp16 --initial-loss-scale 4096 --loss-scale-window 1000
        --hysteresis 2 --min-loss-scale 1 --vocab-file 20B/vocab.json --merge-file 20B/merges.txt
        --data-path pile --split 995,4,1 --attention-softmax-in-fp32 --no-query-key-layer-scaling""",
    ),
    "minicpm_style_wsd": (
        32,
        f"""{LLAMA.replace("--untie-embeddings-and-output-weights", "")} --num-layers 40 --hidden-size 2304
        --ffn-hidden-size 5760 --num-attention-heads 36 --seq-length 4096 --max-position-embeddings 4096
        --micro-batch-size 2 --global-batch-size 960 --train-iters 260000 --lr 0.01 --min-lr 0.001
        --lr-warmup-iters 2000 --lr-decay-style WSD --lr-wsd-decay-iters 26000 --lr-wsd-decay-style exponential
        --start-weight-decay 0.1 --end-weight-decay 0.1 --weight-decay-incr-style linear
        --tokenizer-type SentencePieceTokenizer --tokenizer-model m --data-path d --split 99,1,0
        --vocab-size 122753""",
    ),
    "llm_jp_13b": (
        64,
        f"""{LLAMA} --num-layers 40 --hidden-size 5120 --ffn-hidden-size 13824 --num-attention-heads 40
        --seq-length 4096 --max-position-embeddings 4096 --tensor-model-parallel-size 2
        --pipeline-model-parallel-size 4 --sequence-parallel --micro-batch-size 1 --global-batch-size 1024
        --train-iters 494120 --lr 2e-4 --min-lr 2e-5 --lr-warmup-iters 2000 --adam-eps 1e-8
        --tokenizer-type Llama2Tokenizer --tokenizer-model llm-jp.model
        --train-data-path 100 a_text_document 200 b_text_document --valid-data-path 1 v_text_document
        --eval-interval 999999999 --eval-iters 0 --log-throughput --wandb-project jp
        --wandb-entity nii --wandb-exp-name 13b --vocab-size 99584""",
    ),
    "rocm_llama": (
        8,
        f"""{LLAMA} --group-query-attention --num-query-groups 8 --num-layers 32 --hidden-size 4096
        --ffn-hidden-size 14336 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096
        --micro-batch-size 2 --global-batch-size 128 --train-iters 10 --lr 1e-4 --min-lr 1e-5
        --lr-decay-iters 320000 --lr-warmup-fraction 0.001 --no-async-tensor-model-parallel-allreduce
        --no-bias-swiglu-fusion --no-gradient-accumulation-fusion --mock-data --num-workers 4 --save-interval 5000
        --eval-interval 200 --eval-iters 5 --tokenizer-type HuggingFaceTokenizer --tokenizer-model t
        --dataloader-type cyclic --log-throughput --no-save-optim --no-load-optim --no-load-rng
        --use-distributed-optimizer --overlap-grad-reduce --vocab-size 128256""",
    ),
    "ci_tp2_pp2": (
        8,
        f"{CI} --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel",
    ),
    "ci_interleaved": (
        8,
        f"{CI} --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 --calculate-per-token-loss",
    ),
    "ci_resume_rope_gqa": (
        8,
        f"""{CI} --tensor-model-parallel-size 2 --group-query-attention --num-query-groups 4 --swiglu
        --position-embedding-type rope --rotary-percent 0.5 --rotary-interleaved --disable-bias-linear
        --untie-embeddings-and-output-weights --exit-interval 50 --auto-detect-ckpt-format
        --dist-ckpt-optim-fully-reshardable --use-distributed-optimizer --log-progress""",
    ),
    "ci_context_parallel": (
        8,
        f"""{CI} --context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel --hidden-dropout 0.0
        --attention-dropout 0.0 --cp-comm-type all_gather""",
    ),
    "ci_uneven_pipeline": (
        8,
        f"""{CI} --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1 --num-layers 13
        --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 3""",
    ),
    "release_15b": (
        64,
        """--distributed-timeout-minutes 60 --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
        --num-layers-per-virtual-pipeline-stage 8 --microbatch-group-size-per-virtual-pipeline-stage 4
        --sequence-parallel --use-distributed-optimizer --tp-comm-overlap --disable-bias-linear --micro-batch-size 4
        --rampup-batch-size [384 384 97656250] --global-batch-size 1152 --train-samples 19531250 --manual-gc
        --cross-entropy-loss-fusion --tokenizer-library sentencepiece --tokenizer-model nemotron_2_256k.model
        --data-path 0.3 a_text_document 0.7 b_text_document --split 99,1,0 --no-mmap-bin-files
        --apply-layernorm-1p --untie-embeddings-and-output-weights --position-embedding-type rope
        --rotary-percent 0.5 --squared-relu --num-layers 32 --hidden-size 6144 --num-attention-heads 48
        --group-query-attention --num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096
        --attention-dropout 0.0 --hidden-dropout 0.0 --weight-decay 0.1 --lr-decay-samples 1949218748
        --lr-warmup-samples 3906252 --lr 4.5e-4 --min-lr 4.5e-5 --decoupled-lr 5.0e-4 --decoupled-min-lr 4.5e-5
        --lr-decay-style cosine --eval-iters 32 --eval-interval 2000 --save ckpt --load elsewhere
        --save-interval 1000 --save-retain-interval 5000 --init-method-std 0.0134 --bf16 --exit-interval 13000""",
    ),
    "rocm_llama3_70b_resume": (
        8,
        f"""{LLAMA} --tensor-model-parallel-size 8 --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672
        --num-attention-heads 64 --group-query-attention --num-query-groups 8 --seq-length 2048
        --max-position-embeddings 131072 --micro-batch-size 1 --global-batch-size 8 --train-iters 12 --lr 1e-4
        --min-lr 1e-5 --lr-decay-iters 320000 --tokenizer-type HuggingFaceTokenizer --tokenizer-model t --mock-data
        --dataloader-type cyclic --eval-interval 320000 --eval-iters 10 --no-save-optim --no-save-rng --eval-iters -1
        --exit-interval 0 --use-contiguous-parameters-in-local-ddp --finetune --no-load-optim --no-load-rng
        --recompute-num-layers 80 --recompute-granularity full --recompute-method block --wandb-project=LLama""",
    ),
    "ci_hsdp_fsdp2": (
        8,
        f"""{CI} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
        --num-distributed-optimizer-instances 2 --init-model-with-meta-device --fsdp-double-buffer
        --megatron-fsdp-main-params-dtype fp32 --megatron-fsdp-main-grads-dtype fp32
        --megatron-fsdp-grad-comm-dtype bf16 --use-nccl-ub --ckpt-format fsdp_dtensor""",
    ),
    "mixtral_8x7b": (
        64,
        f"""{LLAMA} --seq-length 4096 --max-position-embeddings 32768 --num-layers 32 --hidden-size 4096
        --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8
        --rotary-base 1000000 --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss
        --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall --overlap-param-gather
        --overlap-grad-reduce --tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model
        --data-path my_text_document --split 99990,8,2 --micro-batch-size 1 --global-batch-size 256 --lr 1e-4
        --train-iters 500000 --lr-decay-iters 320000 --min-lr 1.0e-5 --lr-warmup-iters 500
        --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8
        --use-distributed-optimizer --sequence-parallel --log-interval 1 --save-interval 10000 --eval-interval 1000
        --eval-iters 10 --save ckpt --load ckpt --tensorboard-dir ckpt/tensorboard --no-load-optim --no-load-rng
        --vocab-size 32000""",
    ),
    "qwen3_30b_a3b": (
        32,
        f"""{LLAMA} --seq-length 4096 --max-position-embeddings 40960 --num-layers 48 --hidden-size 2048
        --ffn-hidden-size 6144 --num-attention-heads 32 --kv-channels 128 --group-query-attention
        --num-query-groups 4 --qk-layernorm --rotary-base 1000000 --norm-epsilon 1e-6 --num-experts 128
        --moe-ffn-hidden-size 768 --moe-router-topk 8 --moe-router-score-function softmax --moe-router-dtype fp32
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-layer-freq ([1]*48)
        --moe-grouped-gemm --moe-permute-fusion --moe-token-dispatcher-type alltoall --moe-layer-recompute
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model qwen3 --data-path my_text_document --split 99,1,0
        --micro-batch-size 1 --global-batch-size 512 --train-samples 24414062 --lr 3e-4 --min-lr 3e-5
        --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1 --expert-model-parallel-size 8
        --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 12 --sequence-parallel
        --use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce --save ckpt --save-interval 500
        --vocab-size 151936 --make-vocab-size-divisible-by 1187""",
    ),
    "qwen3_235b_a22b": (
        256,
        f"""{LLAMA} --seq-length 4096 --max-position-embeddings 40960 --num-layers 94 --hidden-size 4096
        --ffn-hidden-size 12288 --num-attention-heads 64 --kv-channels 128 --group-query-attention
        --num-query-groups 4 --qk-layernorm --rotary-base 1000000 --norm-epsilon 1e-6 --num-experts 128
        --moe-ffn-hidden-size 1536 --moe-router-topk 8 --moe-router-load-balancing-type aux_loss
        --moe-aux-loss-coeff 1e-3 --moe-grouped-gemm --moe-token-dispatcher-type flex --moe-enable-deepep
        --tokenizer-type NullTokenizer --vocab-size 151936 --mock-data --micro-batch-size 1 --global-batch-size 1024
        --train-iters 100000 --lr 1e-4 --min-lr 1e-5 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1
        --expert-model-parallel-size 32 --pipeline-model-parallel-size 4 --sequence-parallel
        --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split""",
    ),
    "glm4.5_air": (
        64,
        f"""{LLAMA} --seq-length 4096 --max-position-embeddings 131072 --num-layers 46 --hidden-size 4096
        --ffn-hidden-size 10944 --num-attention-heads 96 --kv-channels 128 --group-query-attention
        --num-query-groups 8 --add-qkv-bias --rotary-percent 0.5 --rotary-base 1000000 --norm-epsilon 1e-5
        --num-experts 128 --moe-ffn-hidden-size 1408 --moe-router-topk 8 --moe-router-score-function sigmoid
        --moe-router-enable-expert-bias --moe-router-bias-update-rate 0 --moe-router-load-balancing-type seq_aux_loss
        --moe-aux-loss-coeff 0 --moe-router-dtype fp32 --moe-layer-freq [0]*1+[1]*45
        --moe-shared-expert-intermediate-size 1408 --moe-shared-expert-overlap --moe-router-pre-softmax
        --moe-grouped-gemm --moe-token-dispatcher-type alltoall --tokenizer-type HuggingFaceTokenizer
        --tokenizer-model glm --data-path my_text_document --split 99,1,0 --micro-batch-size 1
        --global-batch-size 256 --train-iters 100000 --lr 1e-4 --min-lr 1e-5 --tensor-model-parallel-size 1
        --expert-model-parallel-size 8 --pipeline-model-parallel-size 4 --decoder-last-pipeline-num-layers 10
        --vocab-size 151552""",
    ),
    "ci_moe_ep8": (
        8,
        f"""{CI} --num-experts 8 --expert-model-parallel-size 8 --moe-token-dispatcher-type allgather
        --moe-router-load-balancing-type aux_loss --moe-router-topk 2 --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
        --moe-ffn-hidden-size 1024 --moe-router-dtype fp64 --disable-bias-linear --sequence-parallel
        --overlap-grad-reduce --overlap-param-gather --untie-embeddings-and-output-weights
        --position-embedding-type rope --use-distributed-optimizer""",
    ),
    "ci_moe_tp2_pp2_ep4": (
        8,
        f"""{CI} --num-experts 8 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2
        --expert-model-parallel-size 4 --expert-tensor-parallel-size 1 --sequence-parallel --moe-z-loss-coeff 1e-3
        --moe-router-load-balancing-type none --moe-router-topk 2 --moe-router-pre-softmax --disable-bias-linear
        --moe-expert-capacity-factor -1.0 --overlap-moe-expert-parallel-comm""",
    ),
}

# Parameters of the published models whose shape a script has, vocabulary unpadded, from their model cards' weights.
PUBLISHED = {
    "gpt3_345m": 354_823_168 + 48_128,  # GPT-2 medium, plus 47 padding rows of 1024
    "gpt2_small": 124_439_808 + 36_096,  # GPT-2 small, plus 47 padding rows of 768
    "llama1_65b": 65_285_660_672,
    "llama2_7b": 6_738_415_616,
    "llama2_13b": 13_015_864_320,
    "llama2_70b": 68_976_648_192,
    "llama3_8b_rmsnorm": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    "llama3.2_1b": 1_235_814_400,
    "mistral_7b": 7_241_732_096,
    "mistral_nemo_12b": 12_247_782_400,
    "qwen2_7b": 7_615_616_512,
    "qwen2.5_0.5b": 494_032_768,
    "qwen2.5_72b": 72_706_203_648,
    "qwen3_8b": 8_190_735_360,
    "qwen3_0.6b": 596_049_920,
    "tinyllama_1.1b": 1_100_048_384,
    "smollm_135m": 134_515_008,
    "yi_34b": 34_388_917_248,
    "codellama_34b": 33_743_970_304,
    "baichuan2_7b": 7_505_973_248,
    "mixtral_8x7b": 46_702_792_704,
    "qwen3_30b_a3b": 30_532_122_624,
    "qwen3_235b_a22b": 235_093_634_560,
}
