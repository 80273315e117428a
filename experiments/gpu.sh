#!/usr/bin/env bash
# What a GPU must show, in one Markdown file: the CUDA tests (a step of the preset 3b with both engines among them, on a
# device with 130 GB), the packing and loss benchmarks at the shapes of 3B, and a short run.
#
#   bash experiments/gpu.sh REPORT.md            # on the GPU
#   bash experiments/gpu.sh REPORT.md --small    # every part in small, on a CPU too
#
# A part that fails is in the report with what it said, the others still run, and the exit status is 1.
set -uo pipefail
report=$(realpath -m "${1:?the file for the report}")
small=${2:-}
cd "$(dirname "$0")/.."
run=$(mktemp -d)
trap 'rm -rf "$run"' EXIT
failed=0

part() {
  printf '\n## %s\n\n```\n$ %s\n' "$1" "${*:2}" >> "$report"
  if "${@:2}" > "$run/said" 2> "$run/errors"; then
    cat "$run/said" >> "$report"
  else
    failed=1
    { cat "$run/said"; tail -n 30 "$run/errors"; echo "FAILED"; } >> "$report"
  fi
  echo '```' >> "$report"
}

packs=(--rounds 3 --dtype bfloat16 --hidden_size 2048 --intermediate_size 11008 --num_hidden_layers 36
  --num_attention_heads 16 --num_key_value_heads 2 --vocab_size 151936)
losses=(--tokens 12083 --hidden_size 2048 --teacher_hidden_size 3584 --dtype bfloat16)
step=()
if [ "$small" = --small ]; then
  packs=(--rounds 2 --hidden_size 32 --intermediate_size 64 --num_hidden_layers 1 --num_attention_heads 2
    --num_key_value_heads 1)
  losses=(--rounds 2 --tokens 64 --hidden_size 32 --teacher_hidden_size 48 --vocab_size 3000)
  step=(--sft_steps 2 --sft_student 1 --steps 1 --tasks_per_step 4 --hidden_size 32 --layers 1 --eval_questions 0
    --max_new_tokens 24)
fi

printf '# MemOPD on this device\n\n' > "$report"
python -c "import torch; print(torch.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else 'CPU')" >> "$report"
part "CUDA tests, and a step of 3b with both engines" python -m pytest -q -s tests/test_cuda.py
part "Packs" python -m experiments.bench packs "${packs[@]}"
part "Losses" python -m experiments.bench losses "${losses[@]}"
for engine in plain continuous; do
  part "A run, --engine $engine" python train.py --engine $engine --run_dir "$run/$engine" "${step[@]}"
  part "Its seconds and GiB" python -c "import json; print(*[{k: round(v, 2) for k, v in json.loads(x).items()
    if k.startswith(('seconds', 'gib'))} for x in open('$run/$engine/metrics.jsonl') if '\"rl\"' in x][-1:])"
done
exit $failed
