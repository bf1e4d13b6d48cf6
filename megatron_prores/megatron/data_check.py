"""Data that Megatron would stumble over late, silently or for ever: found before the run."""

import argparse
import os

from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.training.utils import get_blend_and_blend_per_split

from megatron_prores.errors import UserError
from megatron_prores.megatron.damage import reason


def check_data(args: argparse.Namespace) -> None:
    """Refuse a run without training data, without the validation data that it wants, or with damaged files.

    Raises:
        UserError: names the flag or the file.
    """
    if args.mock_data:
        return
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    shares = _split_shares(args, blend)
    train, valid = (blend, blend) if blend else (blend_per_split or (None, None))[:2]
    if not train and not args.skip_train:
        raise UserError(
            "there is no data to train on: give --data-path PREFIX or --train-data-path PREFIX, "
            "as prores prepare-data prints it"
        )
    wanted = bool(args.eval_iters)
    if wanted and (not valid or (blend and shares[1] is None)):
        raise UserError(
            "there is no data to evaluate on: give --valid-data-path PREFIX or a --split with a second part, "
            "or --eval-iters 0"
        )
    prefixes = {prefix for part in (train, valid) if part for prefix in part[0]}
    documents = {prefix: count_documents(prefix) for prefix in sorted(prefixes)}
    if blend:
        for share, what in ((shares[0], "training"), (shares[1] if wanted else None, "validation")):
            for prefix, count in documents.items():
                # Megatron's own rounding; it would look for tokens in an empty part for ever.
                if share and round(share[1] * count) <= round(share[0] * count):
                    raise UserError(
                        f"--split {args.split} leaves no {what} document of the {count} in {prefix}: use separate data "
                        "(prores prepare-data --validation-fraction), another --split, or --eval-iters 0"
                    )


def _split_shares(args: argparse.Namespace, blend) -> list:
    if not blend:
        return [None, None, None]
    return convert_split_vector_to_split_matrix(parse_and_normalize_split(args.split))


def count_documents(prefix: str) -> int:
    """The number of documents of a dataset whose two files are there and fit each other.

    Raises:
        UserError: names the file that is missing or damaged.
    """
    for suffix in (".idx", ".bin"):
        if not os.path.isfile(prefix + suffix):
            raise UserError(
                f"the dataset {prefix} is not there ({prefix}{suffix} is missing): "
                "make it with prores prepare-data, and give its prefix without .bin or .idx"
            )
    try:
        dataset = IndexedDataset(prefix)
        tokens = int(dataset.sequence_lengths.astype("int64").sum())
        expected = tokens * dataset.index.dtype_size
    except Exception as error:  # a file cut off or overwritten anywhere
        raise UserError(f"{prefix}.idx is damaged ({reason(error)})") from error
    if os.path.getsize(prefix + ".bin") != expected:
        raise UserError(
            f"{prefix}.bin has {os.path.getsize(prefix + '.bin')} bytes and {prefix}.idx describes {expected}: "
            "one of them is damaged or of another dataset"
        )
    if not tokens:
        raise UserError(f"the dataset {prefix} is empty")
    return len(dataset)
