"""Tensors of safetensors files by name, each read from disk when it is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

from elche.checkpoint.files import open_tensors, read_json
from elche.checkpoint.manifest import MODEL_FILE, MODEL_PART
from elche.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

INDEX_FILE: Final = f"{MODEL_FILE}.index.json"
"""Hugging Face's index of a model in several files."""
MODEL_PARTS: Final = f"{MODEL_PART}*.safetensors"
"""Files of a pipeline's checkpoint, one a rank."""


@final
class WeightFiles(Mapping[str, "Tensor"]):
    """State of a model in files; a tensor occupies memory while it is in use.

    Args:
        files: file of each tensor.
    """

    def __init__(self, files: Mapping[str, Path]) -> None:
        self._files = files

    @staticmethod
    def of(*paths: Path) -> WeightFiles:
        """All tensors of some safetensors files.

        Raises:
            CheckpointError: a file is missing, or is not a safetensors file.
        """
        names = {one: list(open_tensors(one).keys()) for one in paths}
        return WeightFiles({name: one for one in paths for name in names[one]})

    @staticmethod
    def found_at(path: Path) -> WeightFiles:
        """The model in a folder, or in a file.

        Args:
            path: a folder with `model.safetensors`, or with several files and Hugging
                Face's index, or of a checkpoint of elche; or a safetensors file.

        Raises:
            CheckpointError: there is no such file, or it cannot be read.
        """
        if not path.is_dir():
            return WeightFiles.of(path)
        if (path / MODEL_FILE).exists():
            return WeightFiles.of(path / MODEL_FILE)
        if (path / INDEX_FILE).exists():
            index = read_json(path / INDEX_FILE)
            places = index.get("weight_map") if isinstance(index, dict) else None
            if not isinstance(places, dict):
                raise CheckpointError(f"{path / INDEX_FILE} has no weight_map")
            return WeightFiles({name: path / file for name, file in places.items()})
        parts = sorted(path.glob(MODEL_PARTS))
        if not parts:
            raise CheckpointError(
                f"expected {MODEL_FILE}, {INDEX_FILE} or {MODEL_PARTS} in {path}, got "
                f"{sorted(one.name for one in path.iterdir())[:8]}; other formats are "
                "converted by loading them in transformers and save_pretrained"
            )
        return WeightFiles.of(*parts)

    def __getitem__(self, name: str) -> Tensor:
        # Opened each time: an open file would keep all that was read in memory.
        with open_tensors(self._files[name]) as stored:
            if name not in list(stored.keys()):
                raise CheckpointError(f"{self._files[name]} has no {name}")
            tensor: Tensor = stored.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)
