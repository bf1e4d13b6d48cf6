"""The README's first command, with a short run."""

import json
import os
import subprocess
import sys
from pathlib import Path

from runs import environment

ROOT = Path(__file__).parents[2]
SHORT = (
    *("--train-iters", "6", "--lr-warmup-iters", "1", "--lr-wsd-decay-iters", "1"),
    *("--eval-interval", "3", "--eval-iters", "1", "--save-interval", "3", "--log-interval", "2"),
)


def test_the_quick_start_leaves_what_it_promises_and_continues(tmp_path):
    run = tmp_path / "run"
    script = ["bash", str(ROOT / "launch_scripts" / "quickstart.sh"), *SHORT]
    env = environment(PRORES_RUN=str(run), PRORES_VENV=str(Path(sys.prefix)))
    first = subprocess.run(script, env=env, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "step 6/6" in first.stdout and "on validation set: loss" in first.stdout
    assert (run / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert (run / "loss-and-alpha.png").read_bytes().startswith(b"\x89PNG")
    assert any("tfevents" in name for name in os.listdir(run / "tensorboard"))
    (sample,) = [json.loads(line) for line in (run / "sample.jsonl").read_text().splitlines()]
    assert sample["iteration"] == 6 and sample["tokens"] > 0

    again = subprocess.run(script, env=env, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "| loss " not in again.stdout  # nothing is trained twice
