#!/usr/bin/env bash
# From nothing to a small GPT pretrained with ProRes on two pipeline stages: environment, data, training, evaluation,
# picture, sample. About ten minutes on two CPU cores; uses GPUs where there are some. Run it again to continue.
#
#   bash launch_scripts/quickstart.sh [MEGATRON OR PRORES FLAGS ...]
#
# Writes to runs/quickstart (or $PRORES_RUN) and .venv (or $PRORES_VENV).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch_scripts/environment.sh

run=${PRORES_RUN:-runs/quickstart}
trap 'echo "stopped: run the same command again to continue"; exit 130' INT
started=$SECONDS
say() { printf '\n[%d:%02d] %s\n' $(((SECONDS - started) / 60)) $(((SECONDS - started) % 60)) "$*"; }

say "1/5 environment"
make_environment hf
gpus=$("$python" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)')
if [ "$gpus" = 0 ]; then
    stages=2 device=(--host) host=(--host)
    export OMP_NUM_THREADS=1
else
    stages=$((gpus > 1 ? 2 : 1)) device=(--bf16) host=()
fi

say "2/5 data: the source of Python's standard library"
mkdir -p "$run"
if [ ! -f "$run/python-train.idx" ] || [ ! -f "$run/python-valid.idx" ]; then
    "$python" -m megatron_prores.cli prepare-data --input stdlib --output "$run/python" --overwrite \
        --train-tokenizer 4096 --validation-fraction 0.05 --workers 2
else
    echo "already there: $run/python-train, $run/python-valid"
fi

say "3/5 pretraining on $stages pipeline stage(s)"
"$python" -m torch.distributed.run --standalone --nproc-per-node "$stages" \
    -m megatron_prores.megatron.pretrain_gpt --config configs/megatron/quickstart.yaml "${device[@]}" \
    --pipeline-model-parallel-size "$stages" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$run/python-tokenizer" \
    --train-data-path "$run/python-train" --valid-data-path "$run/python-valid" \
    --save "$run/checkpoints" --load "$run/checkpoints" --tensorboard-dir "$run/tensorboard" "$@"

say "4/5 picture"
"$python" -m megatron_prores.cli report --tensorboard-dir "$run/tensorboard" --png "$run/loss-and-alpha.png"

say "5/5 sample"
"$python" -m megatron_prores.cli generate --checkpoint "$run/checkpoints" --prompt $'def read(self, path):\n' \
    "${host[@]}" --max-new-tokens 96 --output "$run/sample.jsonl"

say "done"
cat <<DONE
checkpoints  $run/checkpoints
logs         $run/tensorboard  (${PRORES_VENV:-.venv}/bin/tensorboard --logdir $run/tensorboard)
picture      $run/loss-and-alpha.png
sample       $run/sample.jsonl
DONE
