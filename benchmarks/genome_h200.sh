#!/usr/bin/env bash
# The H200 figures of docs/genome.md. From the repository's root, with the chromosome's file (from pyrodigal's wheel):
#
#     bash benchmarks/genome_h200.sh one  CHROMOSOME.fna.gz OUT     # one GPU, 1,048,576 bases in one sequence; about 5 minutes
#     bash benchmarks/genome_h200.sh four CHROMOSOME.fna.gz OUT     # 4 GPUs that share the sequence, FSDP2 over all; about 4 minutes
#     bash benchmarks/genome_h200.sh smoke CHROMOSOME.fna.gz OUT    # both on 2^18 bases for a few steps; about 3 minutes
#
# OUT/NAME.json, OUT/NAME.png and OUT/NAME.log are what is kept; checkpoints stay in a temporary folder. More options for the script
# come after OUT, e.g. --dropout 0.2.
set -euo pipefail
what=$1 fasta=$2 out=$3
shift 3
work=$(mktemp -d)
mkdir -p "$out"
export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}. PYTHONUNBUFFERED=1
common=(--fasta "$fasta" --scale gpu --markov-order 16 --evaluate-share 1)
alone=(python3 examples/train_genome.py "${common[@]}")
shared=(torchrun --standalone --nproc_per_node=4 examples/train_genome.py "${common[@]}" --context-parallel 4 --fsdp)

# run NAME COMMAND …
run() {
  local name=$1 code=0
  shift
  echo "== $name: $*"
  "$@" --out "$work/$name" 2>&1 | tee "$out/$name.log" || code=$?
  for kind in json png; do
    if [ -f "$work/$name/genome.$kind" ]; then cp "$work/$name/genome.$kind" "$out/$name.$kind"; fi
  done
  return "$code"
}

case $what in
  one) run one "${alone[@]}" --expect-below-markov --minutes 3 "$@" ;;
  four) run four "${shared[@]}" --expect-below-markov --minutes 2 "$@" ;;
  smoke)
    small=(--context 256k --steps 12 --evaluations 1)
    run smoke_one "${alone[@]}" "${small[@]}" "$@"
    run smoke_four "${shared[@]}" "${small[@]}" "$@"
    python3 - "$out" <<'PYTHON'
import json, sys

# the first loss is of equal parameters and the same sequence
one, four = (json.load(open(f"{sys.argv[1]}/smoke_{name}.json"))["steps"][0][2] for name in ("one", "four"))
print(f"first step: {one:.6f} bits per base on one GPU, {four:.6f} on four")
sys.exit(abs(one - four) > 2e-3)
PYTHON
    ;;
  *) echo "got '$what'; expected one, four or smoke" >&2; exit 2 ;;
esac
