"""How the package says that what it was given cannot be used."""

import difflib
import os
import sys
from collections.abc import Callable, Iterable


class UserError(Exception):
    """Bad input. The message is one line: what is wrong, where, and what to do about it. Several are lines of one."""


def run_and_exit(main: Callable[[], None]) -> None:
    """Run `main`; a `UserError` becomes a line on stderr (or a few) and exit code 2, and Ctrl-C exit code 130."""
    if sys.stdout.errors == "strict":  # a path may have bytes that are not text; printing it must not fail
        sys.stdout.reconfigure(errors="surrogateescape")
    try:
        main()
        sys.stdout.flush()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr, flush=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("megatron_prores"):
            raise
        print(f"error: {error.name} is not installed in this environment: pip install it", file=sys.stderr, flush=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter's exit would complain
        sys.exit(141)


def is_text(text: str) -> bool:
    """Whether it can be written as UTF-8: Python gives bytes of the command line that cannot as lone surrogates."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`" (did you mean X?)"` for the known name nearest to `name`, or an empty string."""
    nearest = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" (did you mean {nearest[0]}?)" if nearest else ""
