#!/usr/bin/env bash
# Runs all tests, fast ones first: makes the environment where there is none, then lint, unit tests, the runs in several
# processes, and some under Slurm (as root, where Slurm is installed).
#
#   bash launch_scripts/run_tests.sh [PYTEST OPTIONS ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source launch_scripts/environment.sh
make_environment hf,deepspeed,eval,dev
export OMP_NUM_THREADS=1

if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi
"$python" -m ruff check .
"$python" -m ruff format --check .
# A worker per core: up to four, and up to two where each starts runs of up to four processes. Those go through their
# files in order, as the longest last would leave one worker alone. Of the tests under Slurm those that are over in a
# minute: the others wait for Slurm's clocks (run_tests.sh tests/slurm).
"$python" -m pytest -n logical --maxprocesses 4 --dist loadfile tests --ignore tests/distributed --ignore tests/slurm
"$python" -m pytest -n logical --maxprocesses 2 --dist loadfile --no-loadscope-reorder tests/distributed
"$python" -m pytest tests/slurm/test_submit.py
