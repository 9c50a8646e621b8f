"""Files that one user alone reads: secrets of a run."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Final

from elche.errors import ConfigError

STDIN: Final = "-"
LEAST_BYTES: Final = 16
KEY_BYTES: Final = 32
"""Of a key that elche makes for a run."""
HOW: Final = (
    "bring host 0's here; the first is made by "
    "`(umask 077; openssl rand -hex 32 > key)`"
)


def is_private(descriptor: int) -> bool:
    """Whether an open file is this user's, and nobody else's to read or write."""
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


def read_key(name: str) -> bytes:
    """The secret of a run on several hosts, from a file or from standard input.

    Args:
        name: of the file; ``-`` for the first line of standard input.

    Raises:
        ConfigError: the file is not there, others may read it, or it holds no key.
    """
    if name == STDIN:
        text = sys.stdin.readline()
    else:
        try:
            with Path(name).expanduser().open() as file:
                if not is_private(file.fileno()):
                    mode = os.fstat(file.fileno()).st_mode & 0o777
                    raise ConfigError(
                        f"expected --key-file {name} to be this user's alone, got mode "
                        f"{mode:o}: `chmod 600 {name}`, and a new key if others have "
                        "read it"
                    )
                text = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read --key-file {name}: {error}; {HOW}"
            ) from error
    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) < LEAST_BYTES:
        raise ConfigError(
            f"expected --key-file {name} to hold at least {2 * LEAST_BYTES} "
            f"hexadecimal digits, the same on every host; {HOW}"
        )
    return key


def read_or_make_key(name: str) -> bytes:
    """The secret in a file, which is made, for this user alone, if it is not there.

    Raises:
        ConfigError: it cannot be made; else as `read_key`.
    """
    path = Path(name).expanduser()
    if name != STDIN and not path.exists():
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(made, "w") as file:
                file.write(f"{secrets.token_hex(KEY_BYTES)}\n")
        except OSError as error:
            raise ConfigError(f"cannot make --key-file {name}: {error}") from error
    return read_key(name)
