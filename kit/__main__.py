"""`python -m kit`, and the program `kit`."""

import os
import signal
import sys
from typing import NoReturn

from kit.cli import main


def start() -> NoReturn:
    """Run the command line and end this process with its exit code."""
    code = main()
    if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        # Everything is cleaned up by now. An exception out of a signal handler can leave a lock of
        # some library taken, for which the interpreter's own end would then wait for ever.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    start()
