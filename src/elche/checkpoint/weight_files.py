"""Tensors of safetensors files by name, each read from disk when it is asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from elche.checkpoint.files import open_tensors
from elche.checkpoint.manifest import MODEL_PART
from elche.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

MODEL_FILES: Final = ("model.safetensors", "model-*.safetensors")
"""Files of a model in a folder: of transformers, and of a checkpoint of elche."""


@final
class WeightFiles(Mapping[str, "Tensor"]):
    """State of a model in safetensors files; a tensor takes memory while it is used.

    Args:
        paths: the files.

    Raises:
        CheckpointError: a file is missing, or is not a safetensors file; or two files
            have a tensor of the same name, and are not of ranks that share it.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._files: dict[str, Path] = {}
        for path in paths:
            for name in list(open_tensors(path).keys()):
                is_copy = path.name.startswith(MODEL_PART)  # ranks that share a tensor
                if self._files.setdefault(name, path) != path and not is_copy:
                    raise CheckpointError(
                        f"{name} is in {self._files[name]} and in {path.name}; give "
                        "the files of one model in a folder"
                    )

    @staticmethod
    def found_at(path: Path) -> WeightFiles:
        """The model in a folder, or in a file.

        Raises:
            CheckpointError: there is no such file, or it cannot be read.
        """
        if not path.is_dir():
            return WeightFiles([path])
        found = sorted(file for one in MODEL_FILES for file in path.glob(one))
        if not found:
            raise CheckpointError(
                f"expected {' or '.join(MODEL_FILES)} in {path}, got "
                f"{sorted(one.name for one in path.iterdir())[:8]}"
            )
        return WeightFiles(found)

    def __getitem__(self, name: str) -> Tensor:
        # Opened each time: an open file would keep all that was read in memory.
        with open_tensors(self._files[name]) as stored:
            tensor: Tensor = stored.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
