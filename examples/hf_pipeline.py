"""A loop over a model of transformers, cut into stages by measured speed.

elche run --speeds 1,0.4 examples/hf_pipeline.py

prints the losses that ``python examples/hf_pipeline.py`` prints, whose process holds
the whole model. docs/pipelines.md has what a script without elche changes for it. Needs
``pip install 'elche[transformers]'``.
"""

import random
import tempfile
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_scheduler

from elche.pipeline import Pipeline

EPOCHS = 2

torch.manual_seed(0)
text = Path(random.__file__).read_text(encoding="utf-8")
rows = [torch.tensor([*line.encode()[:48]]) for line in text.splitlines() if line]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pads to the longest; padding is not to be learned."""
    ones = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True),
        "attention_mask": pad_sequence(ones, batch_first=True),
        "labels": pad_sequence(rows, batch_first=True, padding_value=-100),
    }


config = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config)
loader = DataLoader(rows[:160], batch_size=16, shuffle=True, collate_fn=collate)
held_out = DataLoader(rows[160:192], batch_size=16, collate_fn=collate)
sample = {**collate(rows[:4]), "use_cache": False}
pipe = Pipeline(model, None, micro_batches=4, costs="measure", sample=sample)
optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
scheduler = get_scheduler("cosine", optimizer, 5, EPOCHS * len(loader))

for epoch in range(EPOCHS):
    for batch in loader:
        loss = pipe.step(batch).loss
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    losses = [pipe.evaluate(batch).loss for batch in held_out]
    if pipe.rank == 0:
        print(f"epoch {epoch}: loss {loss:.5f}, held out {sum(losses) / 2:.5f}")
state = pipe.state_dict()
if pipe.rank == 0:
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder, state_dict=state)
    print(f"saved: {sorted(path.name for path in Path(folder).iterdir())}")
pipe.close()
