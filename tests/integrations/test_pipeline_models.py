"""Models of transformers are cut and trained as they come.

`python -m tests.integrations.model_table` tries more models, schedules and ranks.
"""

from __future__ import annotations

import pytest

from tests.harness.rank_pool import RankPool
from tests.integrations.cases.hf_models import FAMILIES, alone, piped, worst_error

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("name", ["GPT-2", "Llama", "Mixtral", "BART"])
def test_gradients_are_those_of_one_process(ranks2: RankPool, name: str) -> None:
    expected = alone(name)
    for schedule in ("zb-v", "auto"):
        found = ranks2.serve(piped, name, schedule)
        assert not found[0].refused
        assert worst_error(found, expected) <= FAMILIES[name].tolerance
