"""Why a checkpoint or a dataset could not be read, in a few words."""

from torch.distributed.checkpoint.api import CheckpointException

# A file can be cut off anywhere, so that any reader may fail. CheckpointException is not an Exception.
DAMAGE = (Exception, CheckpointException)


def reason(error: BaseException) -> str:
    """`FileNotFoundError: no such file`; of what went wrong on several ranks, the first."""
    while isinstance(error, CheckpointException):  # holds what each rank raised
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
