"""A LoRA adapter trained by Hugging Face's Trainer, shared by unequal devices.

elche run --speeds 1,0.3 examples/hf_trainer.py

prints the losses that ``python examples/hf_trainer.py`` prints on one device. A tiny
network of random weights learns sentences made on the spot; nothing is downloaded.
Needs ``pip install 'elche[transformers]' peft``.
"""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

from elche.integrations.transformers import ElcheTrainer, ElcheTrainingArguments

WORDS, PADDING = 32, -100

set_seed(0)
sentences = []
for _ in range(512):
    length = int(torch.randint(4, 24, ()))
    start, step = torch.randint(WORDS, ()), torch.randint(1, 4, ())
    sentences.append({"input_ids": (start + step * torch.arange(length)) % WORDS})


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Pads to the longest; padding is not to be learned."""
    words = [row["input_ids"] for row in rows]
    return {
        "input_ids": pad_sequence(words, batch_first=True),
        "labels": pad_sequence(words, batch_first=True, padding_value=PADDING),
    }


config = GPT2Config(
    vocab_size=WORDS,
    n_positions=32,
    n_embd=32,
    n_layer=2,
    n_head=2,
    bos_token_id=0,
    eos_token_id=0,
    attn_pdrop=0.0,  # dropout would draw other masks on each device
    embd_pdrop=0.0,
    resid_pdrop=0.0,
)
lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True)
trainer = ElcheTrainer(
    model=get_peft_model(GPT2LMHeadModel(config), lora),
    args=ElcheTrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=3,
        learning_rate=2e-2,
        logging_strategy="epoch",
        save_strategy="no",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=sentences,
    data_collator=collate,
)
trainer.train()
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("loss per token:", ", ".join(f"{loss:.4f}" for loss in losses))
