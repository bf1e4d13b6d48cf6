"""The `prores` command: one subcommand per module of `megatron_prores.commands`."""

import importlib
import sys

from megatron_prores import __version__
from megatron_prores.errors import UserError, did_you_mean, run_and_exit
from megatron_prores.options import Parser

# Each module has add_arguments(parser) and run(args), or main(argv) where Megatron's parser reads the flags. Only the
# one that is asked for is imported.
COMMANDS = {
    "schedule": ("schedule", "print and draw alpha for any schedule, before training"),
    "plan": ("plan", "print what a Megatron run would be, and what is wrong with it, before it has GPUs"),
    "submit": ("submit", "put a run, or a sweep of runs, into Slurm's queue, once it is known that it can run"),
    "status": ("status", "print how runs under Slurm stand: iteration, loss, alpha, time left, requeues"),
    "prepare-data": ("prepare_data", "turn text into Megatron's indexed dataset"),
    "report": ("report", "draw a run's loss and alpha from its TensorBoard logs"),
    "generate": ("generate", "sample text from a checkpoint"),
    "evaluate": ("evaluate", "compute a model's perplexity on a held-out set, or its scores on tasks"),
    "compare": ("compare", "train arms from several seeds, all else equal, and report what differs"),
    "export": ("export", "write a checkpoint as a Hugging Face model, its alphas in the weights"),
    "import": ("import_", "turn a Hugging Face model into a checkpoint to continue from"),
    "doctor": ("doctor", "print versions and what was built, and check the operators on this machine"),
}


def _overview() -> str:
    lines = [f"  {name:<14}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        ["usage: prores COMMAND [options]", "", "commands:", *lines, "", "prores COMMAND --help says more"]
    )


def run(argv: list[str]) -> None:
    """Run one subcommand.

    Raises:
        UserError: the command line, or what it names, cannot be used.
    """
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return
    if argv == ["--version"]:
        print(f"megatron_prores {__version__}")
        return
    name, *rest = argv
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}{did_you_mean(name, COMMANDS)}; choose one of {', '.join(COMMANDS)}")
    module_name, summary = COMMANDS[name]
    module = importlib.import_module(f"megatron_prores.commands.{module_name}")
    if hasattr(module, "main"):
        module.main(rest)
        return
    parser = Parser(prog=f"prores {name}", description=summary)
    module.add_arguments(parser)
    module.run(parser.parse_args(rest))


def main() -> None:
    run_and_exit(lambda: run(sys.argv[1:]))


if __name__ == "__main__":
    main()
