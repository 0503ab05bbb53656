# Sourced by the launch scripts: TORCHRUN_ARGS, how torchrun's nodes meet and how it stops.
#
#   NUM_NODES         nodes of the job; the script has set it
#   MASTER_ADDR       name of the first node; under Slurm it is found
#   MASTER_PORT       a free port of that node
#   NODE_RANK         0 to NUM_NODES - 1: only where nodes have to be numbered by hand; otherwise they agree
#   SHUTDOWN_TIMEOUT  seconds that the ranks have to finish their step and save after SIGTERM

NUM_NODES="${NUM_NODES:-1}"
TORCHRUN_ARGS=()

if ((NUM_NODES > 1)); then
    if [[ -z "${MASTER_ADDR:-}" && -n "${SLURM_JOB_NODELIST:-}" ]]; then
        MASTER_ADDR="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
    fi
    MASTER_ADDR="${MASTER_ADDR:?set MASTER_ADDR to the name of the first of $NUM_NODES nodes, the same on each}"
    MASTER_PORT="${MASTER_PORT:-$((20000 + ${SLURM_JOB_ID:-9500} % 10000))}"
    TORCHRUN_ARGS+=(--nnodes "$NUM_NODES")
    if [[ -n "${NODE_RANK:-}" ]]; then
        TORCHRUN_ARGS+=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
    else
        TORCHRUN_ARGS+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT")
        TORCHRUN_ARGS+=(--rdzv-id "${SLURM_JOB_ID:-megatron_lite}")
    fi
fi

# torchrun passes SIGTERM on and kills what is left after 30 seconds: too soon for a step and a save of a large model.
# Later releases of torch take another time.
if python -c '
import importlib.util, pathlib, sys
torchrun = pathlib.Path(importlib.util.find_spec("torch").origin).parent / "distributed/run.py"
sys.exit("--shutdown-timeout" not in torchrun.read_text())' 2>/dev/null; then
    TORCHRUN_ARGS+=(--shutdown-timeout "${SHUTDOWN_TIMEOUT:-280}")
else
    echo "note: this torchrun kills the ranks 30 s after SIGTERM, saved or not: for longer steps and saves stop in" \
        "time with --exit-duration-in-mins, or take torch 2.13" >&2
fi
