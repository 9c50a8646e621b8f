"""Memory of sums is lent again when nobody holds it, and not before."""

from __future__ import annotations

import torch

from elche.comm.gradients.buckets.bucket import SumMemory

CPU = torch.device("cpu")


def test_memory_is_lent_again_when_its_last_view_is_gone() -> None:
    memory = SumMemory(4, torch.float64, CPU)
    first = memory.lend()
    place, part = first.data_ptr(), first[1:].detach()
    del first
    assert memory.lend().data_ptr() != place  # a part is held
    del part
    assert place in {memory.lend().data_ptr() for _ in range(2)}


def test_what_is_kept_stays_as_it_is() -> None:
    memory = SumMemory(2, torch.float32, CPU)
    kept = []
    for value in range(5):
        lent = memory.lend()
        lent.fill_(value)
        kept.append(lent.view(1, 2))
        del lent
    assert [each.tolist() for each in kept] == [[[v, v]] for v in range(5)]
    places = {each.data_ptr() for each in kept}
    kept.clear()
    assert memory.lend().data_ptr() in places
    assert len(memory._lent) == 1  # the others have been given back
