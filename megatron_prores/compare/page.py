"""The report of a comparison: one HTML file that needs nothing else, with its pictures and tables beside it."""

import base64
import io
import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path

import yaml

from megatron_prores.compare.figures import Picture, pictures
from megatron_prores.compare.results import ArmResult, write_tables
from megatron_prores.compare.statistics import Estimate
from megatron_prores.compare.wording import perplexity, sentences, signed_with_interval, with_interval
from megatron_prores.report import GRAD_NORM_TAG, LOSS_TAG
from megatron_prores.whole_file import replacing

COMMAND_FILE = "command.txt"
"""In --output."""

_SHOWN = (
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "seq_length", "padded_vocab_size"),
    *("global_batch_size", "train_iters", "lr", "lr_warmup_iters", "lr_decay_style", "weight_decay", "clip_grad"),
    *("train_data_path", "valid_data_path", "tokenizer_model", "processes"),
)

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 1180px; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2rem; }
p, li { max-width: 75ch; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; }
th, td { padding: 0.35rem 0.6rem; text-align: right; border-bottom: 1px solid #ddd; }
th:first-child, td:first-child, .words { text-align: left; }
.lower { color: #05620e; font-weight: 600; } .higher { color: #9c1c1c; font-weight: 600; }
.pictures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); }
figure { margin: 0; } img { width: 100%; height: auto; } figcaption { font-size: 0.85rem; color: #555; }
pre { background: #f5f5f5; padding: 0.6rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 0.85rem; }
@media (max-width: 700px) {
  thead { display: none; }
  tr { display: block; border: 1px solid #ccc; border-radius: 6px; margin-bottom: 0.8rem; padding: 0.3rem; }
  td { display: flex; justify-content: space-between; gap: 1rem; border: 0; padding: 0.15rem 0.4rem; }
  td, td:first-child, td.words { text-align: right; }
  td::before { content: attr(data-label); color: #555; text-align: left; }
  td:first-child { font-weight: 600; }
}
"""

_DEFINITIONS = """
<ul>
<li><b>Loss</b>: of the last checkpoint, with alpha as it was at that step; the sum of the cross-entropies of all tokens
of the held-out set over their number where such a set was given, else the trainer's last validation loss. Perplexity is
its exponential; bits per byte do not depend on the tokenizer.</li>
<li><b>Intervals</b>: 95%, by Student's t over the seeds. <b>Difference</b>: loss minus the baseline's, seed by seed, so
that what two arms share (data order, initial weights) drops out. Each comparison is judged by itself: of twenty that
differ in nothing one is expected to stand out.</li>
<li><b>Spike score</b> (OLMo 2): share of steps at least seven standard deviations from the mean of the 1,000 steps
before, over 10% to 90% of the run; mean over the seeds.</li>
<li><b>Activation norm</b>: root mean square of a layer's output, mean over the tokens of one microbatch that stays the
same. <b>Residual output</b>: what attention and MLP of a layer put out before alpha, for the same tokens; shown is the
cosine to that of the last step (the paper's Figures 3 and 4).</li>
<li><b>Bands</b> reach from the lowest to the highest seed. <b>Seconds per step</b>: median over each run, on a machine
that may have run others beside it.</li>
</ul>
"""


def write_report(results: Sequence[ArmResult], output: Path) -> Path:
    """Write report.html, the PNGs in it and the CSV tables.

    Returns:
        The page's path.
    """
    write_tables(results, output)
    seeds = max(len(result.runs) for result in results)
    body = [
        f"<h1>{len(results)} arms, {seeds} seed{'s' * (seeds > 1)}</h1>",
        "<ul>",
        *(f"<li>{sentence}</li>" for sentence in map(escape, sentences(results))),
        "</ul>",
        "<h2>Results</h2>",
        _table(results),
        *_sections(pictures(results), output),
        "<h2>What the numbers are</h2>",
        _DEFINITIONS,
        "<h2>Settings</h2>",
        "<p>Everything that is not named here is the same in all arms, the order of the data included. A seed gives "
        "all arms with the same initialisation and layout the same initial weights.</p>",
        *(f"<pre>{escape(text)}</pre>" for text in (_command(output), _settings(results), _shared(results)) if text),
    ]
    page = output / "report.html"
    with replacing(page) as new:
        new.write_text(_html(body), encoding="utf-8")
    return page


_COLUMNS = (
    *("arm", "seeds", "loss (nats per token)", "perplexity", "bits per byte", "difference to baseline", "verdict"),
    *("spike score of the loss", "spike score of the gradient norm", "seconds per step"),
)


def _table(results: Sequence[ArmResult]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in _COLUMNS)
    rows = "".join(_row(result) for result in results)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(result: ArmResult) -> str:
    difference = result.difference
    seeds = str(len(result.runs)) + (f" ({len(result.diverged)} diverged)" if result.diverged else "")
    bits = result.estimate(lambda run: run.bits_per_byte)
    cells = [
        result.arm.name,
        seeds,
        _or_dash(result.loss, with_interval),
        _or_dash(result.loss, perplexity),
        _or_dash(bits, with_interval),
        "-" if difference is None else _or_dash(difference, signed_with_interval),
        result.verdict,
        _percent(result, lambda run: run.spikes(LOSS_TAG)),
        _percent(result, lambda run: run.spikes(GRAD_NORM_TAG)),
        _or_dash(result.estimate(lambda run: run.seconds_per_step), lambda seconds: f"{seconds.mean:.3g}"),
    ]
    kinds = {_COLUMNS.index("verdict"): f"words {result.verdict.split()[0]}"}
    return "<tr>" + "".join(_cell(text, index, kinds) for index, text in enumerate(cells)) + "</tr>"


def _cell(text: str, index: int, kinds: dict[int, str]) -> str:
    kind = f' class="{kinds[index]}"' if index in kinds else ""
    return f'<td{kind} data-label="{escape(_COLUMNS[index])}">{escape(text)}</td>'


def _or_dash(estimate: Estimate, text) -> str:
    return text(estimate) if estimate.values and math.isfinite(estimate.mean) else "-"


def _percent(result: ArmResult, value) -> str:
    """Over all runs, those that diverged too."""
    mean = sum(map(value, result.runs)) / len(result.runs)
    return f"{100 * mean:.2g}%" if math.isfinite(mean) else "-"


def _sections(shown: Iterable[Picture], output: Path) -> Iterable[str]:
    for section, together in groupby(shown, key=lambda picture: picture.section):
        yield f"<h2>{escape(section)}</h2>"
        yield f'<div class="pictures">{"".join(_save(picture, output) for picture in together)}</div>'


def _save(picture: Picture, output: Path) -> str:
    """Write the PNG, and give what the page shows."""
    buffer = io.BytesIO()
    picture.figure.savefig(buffer, format="png", dpi=200)
    (output / f"{picture.name}.png").write_bytes(buffer.getvalue())
    data, text = base64.b64encode(buffer.getvalue()).decode("ascii"), escape(picture.caption)
    return f'<figure><img src="data:image/png;base64,{data}" alt="{text}"><figcaption>{text}</figcaption></figure>'


def _settings(results: Sequence[ArmResult]) -> str:
    settings = {
        result.arm.name: ({"versus": result.arm.versus} if result.arm.versus else {}) | result.arm.settings
        for result in results
    }
    return yaml.safe_dump(settings, sort_keys=False, allow_unicode=True).rstrip()


def _command(output: Path) -> str:
    """What the runs were started with."""
    path = output / COMMAND_FILE
    return path.read_text() if path.exists() else ""


def _shared(results: Sequence[ArmResult]) -> str:
    """What the runs were, and where they were made; settings.json of each run has everything."""
    run = results[0].runs[0]
    settings = json.loads((run.folder / "settings.json").read_text())
    shown = {name.replace("_", "-"): settings[name] for name in _SHOWN if name in settings}
    return yaml.safe_dump(shown | run.made_with, sort_keys=False, allow_unicode=True).rstrip()


def _html(body: Iterable[str]) -> str:
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>prores compare</title><style>{_STYLE}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )
