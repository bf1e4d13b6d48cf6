"""Which checkpoint a run under DeepSpeed continues from."""

import pytest

from megatron_prores.deepspeed.checkpoint import is_universal, latest

ASKED = {"checkpoint": {"load_universal": True}}


def names(folder, plain: str | None, universal: str | None) -> str:
    for file, name in (("latest", plain), ("latest_universal", universal)):
        if name is not None:
            (folder / file).write_text(name)
    return str(folder)


@pytest.mark.parametrize(
    ("plain", "universal", "chosen"),
    [
        ("global_step4", "global_step4_universal", True),
        ("global_step10", "global_step4_universal", False),  # saved since: going back would lose steps
        (None, "global_step4_universal", True),
        ("global_step4", None, True),  # refused later, with what is missing
    ],
)
def test_a_universal_checkpoint_is_loaded_until_something_newer_is_there(tmp_path, plain, universal, chosen):
    folder = names(tmp_path, plain, universal)
    assert is_universal(ASKED, folder) is chosen
    assert is_universal({}, folder) is False
    assert latest(folder, universal=False) == plain and latest(folder, universal=True) == universal
