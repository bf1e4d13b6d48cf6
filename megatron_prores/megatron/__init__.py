"""ProRes inside Megatron-Core and Megatron's own trainer.

Importing this package does not import Megatron, so that the host backend can be installed first.
"""


def enable() -> None:
    """Switch ProRes on in this process: call it once, before Megatron parses its arguments.

    Adds the `--prores-*` flags to Megatron's parser, starts from the weights of `--prores-init`, sets alpha before
    every training step and evaluation, logs it beside Megatron's scalars, probes the layers of runs that ask for it,
    and compares schedule and norms with the checkpoint's on resume. Use it with
    `--spec megatron_prores.megatron.spec prores_layer_spec`.
    """
    from megatron_prores.megatron import alpha_log, arguments, driver, guard, initial, probe

    arguments.install()
    driver.install()
    initial.install()
    alpha_log.install()
    probe.install()
    guard.install()
