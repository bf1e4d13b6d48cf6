"""Which options `prores evaluate` takes together."""

import pytest

from megatron_prores import cli
from megatron_prores.errors import UserError


@pytest.mark.parametrize(
    "words, message",
    [
        ([], "needs --data PREFIX or --tasks A,B, one of them"),
        (["--checkpoint", "c"], "needs --data PREFIX or --tasks A,B, one of them"),
        (["--checkpoint", "c", "--data", "d", "--tasks", "t"], "needs --data PREFIX or --tasks A,B, one of them"),
        (["--data", "d"], "needs --checkpoint DIR, or with --tasks --model DIR"),
        (["--tasks", "t", "--model", "m", "--checkpoint", "c"], "needs --checkpoint DIR, or with --tasks --model DIR"),
        (["--data", "d", "--model", "m"], "--model has no meaning with --data"),
        (["--data", "d", "--checkpoint", "c", "--limit", "3"], "--limit has no meaning with --data"),
        (["--tasks", "t", "--model", "m", "--max-tokens", "3"], "--max-tokens has no meaning with --tasks"),
        (["--tasks", "t", "--model", "m", "--ckpt-step", "3"], "--ckpt-step has no meaning with --model"),
        (["--tasks", "t", "--model", "m", "--batch-size", "x"], "invalid int value"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(words, message):
    with pytest.raises(UserError) as caught:
        cli.run(["evaluate", *words])
    assert message in str(caught.value) and "\n" not in str(caught.value)
