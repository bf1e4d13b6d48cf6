"""A user's own training script, shaped like Megatron's pretrain_gpt.py.

`WITH_PRORES=1` adds the one call that the README shows. Without it this is stock Megatron on the host backend; only
the batches come from this package, because Megatron's wheel has none.
"""

import os

from megatron_prores.megatron import enable, host

if __name__ == "__main__":
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533", "RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    host.install()
    if os.environ.get("WITH_PRORES") == "1":
        enable()

    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_prores.megatron import engine_fixes, gpt

    engine_fixes.install()
    args = parse_and_validate_args()
    pretrain(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        gpt.datasets,
        ModelType.encoder_or_decoder,
        gpt.forward_step,
        get_embedding_ranks=gpt.embedding_ranks,
    )
