"""`python -m headwater ARGUMENTS`: the command `headwater`, where the wheel was built with it."""

import os
import sys
from pathlib import Path


def command() -> Path:
    """Where the wheel's command is, or would be."""
    return Path(__file__).parent / "bin" / "headwater"


def main() -> int:
    """Replaces this process by the command; its exit code is the command's."""
    path = command()
    if not path.is_file():
        print(
            "headwater: this package was built without the command. It is built where CLI11, fmt, nlohmann-json, OpenMP, "
            "PCRE2 and oneDNN are installed (docs/DEPENDENCIES.md), by `pip install .` in the source tree.",
            file=sys.stderr,
        )
        return 4
    os.execv(path, [str(path), *sys.argv[1:]])


if __name__ == "__main__":
    sys.exit(main())
