"""Every norm placement with and without ProRes, on one corpus, from one seed: loss curves as CSV and PNG.

    python benchmarks/placements.py --data runs/placements/python --output runs/placements

`--data` is what `prores prepare-data --output` was given. Arms that are finished are not run again.
"""

import argparse
import csv
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from matplotlib.figure import Figure
from tqdm import tqdm

from megatron_prores.errors import UserError, run_and_exit
from megatron_prores.report import LOSS_TAG, VALIDATION_TAG, read_scalars

ROOT = Path(__file__).parents[1]
CONFIGS = [ROOT / "configs/megatron/quickstart.yaml", ROOT / "benchmarks/placements.yaml"]
# The paper gives post-norm and DeepNorm a learning-rate warm-up of 10% of the run.
LONG_WARMUP = ("--lr-warmup-iters", "30")
PLACEMENTS = {"pre": (), "sandwich": (), "lns": (), "post": LONG_WARMUP, "deepnorm": LONG_WARMUP}
SCHEDULES = ["none", "linear"]
# What the paper's Table 6 gives post-norm instead of `linear`.
MORE = [("post", "linear-square"), ("post", "stagewise-L")]
ARMS = [*((norm, schedule) for norm in PLACEMENTS for schedule in SCHEDULES), *MORE]


def run_arm(norm: str, schedule: str, data: str, output: Path, flags: list[str]) -> str:
    """Train one arm in one process and return what to say about it."""
    folder = output / f"{norm}-{schedule}"
    if (folder / "finished").exists():
        return f"{folder.name}: already there"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "megatron_prores.megatron.pretrain_gpt", "--host"]
    for config in CONFIGS:
        command += ["--config", str(config)]
    command += ["--prores-norm", norm, "--prores-schedule", schedule, *PLACEMENTS[norm]]
    command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", f"{data}-tokenizer"]
    command += ["--train-data-path", f"{data}-train", "--valid-data-path", f"{data}-valid"]
    command += ["--tensorboard-dir", str(folder / "tensorboard"), *flags]
    with open(folder / "log.txt", "w") as log:
        code = subprocess.run(
            command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT
        ).returncode
    if code:
        return f"{folder.name}: ended with exit code {code}, see {folder / 'log.txt'}"
    (folder / "finished").touch()
    return f"{folder.name}: done"


def write_results(output: Path) -> None:
    """Curves and final losses as CSV, and the picture, of the arms that are finished."""
    runs = {
        arm: read_scalars(output / f"{arm[0]}-{arm[1]}" / "tensorboard")
        for arm in ARMS
        if (output / f"{arm[0]}-{arm[1]}" / "finished").exists()
    }
    with open(output / "placements.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["norm", "schedule", "curve", "iteration", "loss"])
        for (norm, schedule), scalars in runs.items():
            for curve, tag in (("training", LOSS_TAG), ("validation", VALIDATION_TAG)):
                for step, value in zip(*scalars[tag], strict=True):
                    writer.writerow([norm, schedule, curve, step, f"{value:.5f}"])
    draw(runs).savefig(output / "placements.png", dpi=110)
    print(f"{'norm':<10}{'schedule':<15}{'validation loss, nats per token':>32}")
    for (norm, schedule), scalars in runs.items():
        print(f"{norm:<10}{schedule:<15}{scalars[VALIDATION_TAG][1][-1]:>32.4f}")


def draw(runs: dict) -> Figure:
    """A panel for each placement: validation curves of its arms."""
    figure = Figure(figsize=(15, 3.6), layout="constrained")
    panels = figure.subplots(1, len(PLACEMENTS), sharey=True)
    colours = {"none": "0.45", "linear": "C0", "linear-square": "C1", "stagewise-L": "C2"}
    for panel, norm in zip(panels, PLACEMENTS, strict=True):
        for (placement, schedule), scalars in runs.items():
            if placement == norm:
                steps, losses = scalars[VALIDATION_TAG]
                panel.plot(steps, losses, color=colours[schedule], label=f"{schedule}: {losses[-1]:.3f}")
        panel.set(title=norm, xlabel="iteration")
        panel.legend(title="schedule: last loss", fontsize=8, title_fontsize=8)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("validation loss (nats per token)")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--data", required=True, metavar="PREFIX", help="of prores prepare-data, with a validation part"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a folder per arm, CSV and PNG")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="arms at a time (default: one per core)")
    options, flags = parser.parse_known_args()
    if not Path(f"{options.data}-train.idx").exists():
        raise UserError(
            f"--data {options.data}: there is no {options.data}-train.idx; make it with prores prepare-data"
        )
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(run_arm, *arm, options.data, options.output, flags) for arm in ARMS]
        for job in tqdm(jobs, unit="arm"):
            tqdm.write(job.result())
    write_results(options.output)


if __name__ == "__main__":
    run_and_exit(main)
