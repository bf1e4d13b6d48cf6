"""Many command lines in forks of one process that has Megatron imported: seconds for all instead of each."""

import json
import subprocess
import sys
from pathlib import Path

from runs import environment

PROGRAM = """
import importlib, json, os, sys
from megatron_prores.megatron import host
host.install()
import megatron.training.training
import torch._dynamo
from megatron_prores.megatron import gpt, plan, pretrain_gpt, progress

module, cases = sys.argv[1], json.load(open(sys.argv[2]))
module, outcomes = importlib.import_module(module), {}
for name, (argv, world) in cases.items():
    files = {2: f"{sys.argv[2]}-errors", 1: f"{sys.argv[2]}-output"}
    child = os.fork()
    if child == 0:
        for descriptor, path in files.items():
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
        if world > 1:  # one process finds its own address
            os.environ.update(WORLD_SIZE=str(world), RANK="0", LOCAL_RANK="0")
        sys.argv[1:] = argv
        module.main()
        sys.stdout.flush()
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcomes[name] = [code, open(files[1]).read(), open(files[2]).read()]
print(json.dumps(outcomes))
"""


def outcomes(folder: Path, module: str, cases: dict[str, tuple[list[str], int]]) -> dict[str, list]:
    """Run `module.main()` for each case.

    Args:
        folder: to run in.
        cases: command line (without the program) and WORLD_SIZE by name.

    Returns:
        [exit code, stdout, stderr] by name.
    """
    (folder / "cases.json").write_text(json.dumps(cases))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, module, str(folder / "cases.json")],
        env=environment(),
        capture_output=True,
        text=True,
        cwd=folder,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
