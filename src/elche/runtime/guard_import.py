"""Imports the guard that a user names, as Python would in the user's script."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Sequence

from elche.errors import ConfigError

logger = logging.getLogger(__name__)


def find_guard(name: str, import_path: Sequence[str] = ()) -> object:
    """What stands at ``"package.module:Name"``.

    The code runs in this process. Where modules are looked for stays changed: a guard
    may import more when it is asked.

    Args:
        name: of the class, in a module that only defines things.
        import_path: folders to look in before those of this process: the script's.

    Raises:
        ConfigError: it cannot be imported.
    """
    sys.path[:0] = [folder for folder in import_path if folder not in sys.path]
    importlib.invalidate_caches()
    module, _, path = name.partition(":")
    try:
        found: object = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        if not isinstance(error, (ImportError, AttributeError)):
            logger.exception("the guard's module %r failed", module)
        looked = "".join(f"{folder}, " for folder in import_path[:1])
        raise ConfigError(
            f"the guard {name!r} cannot be imported ({type(error).__name__}: {error}); "
            "expected the place of a class as 'package.module:Name', in a module "
            f"beside the script ({looked}where Python looks first) or on PYTHONPATH"
        ) from error
    return found
