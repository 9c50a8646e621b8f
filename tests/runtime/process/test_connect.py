"""Where a rank under torchrun takes the run's key from."""

from __future__ import annotations

from pathlib import Path

import pytest

from elche.errors import CommunicationError
from elche.runtime.process.connect import _hide, _read_hidden, stop_coordinator


def test_a_key_is_this_users_alone_and_goes_with_the_coordinator() -> None:
    path = _hide("127.0.0.1:1/00")
    assert Path(path).stat().st_mode & 0o777 == 0o600
    assert _read_hidden(path) == "127.0.0.1:1/00"
    stop_coordinator()
    assert not Path(path).exists()


def test_a_file_that_others_may_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text("127.0.0.1:1/00")
    path.chmod(0o644)
    with pytest.raises(CommunicationError, match="not a file of this user alone"):
        _read_hidden(str(path))
