"""What ranks train with transformers and peft, and the same work in one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

import elche
from elche.integrations.transformers import ElcheTrainer, ElcheTrainingArguments

WORDS, SAMPLES, HELD_OUT = 32, 44, 12
PADDING = -100
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    Attributes:
        model: ``"gpt2"`` (mean over tokens), ``"bert"`` (over samples, and takes
            ``num_items_in_batch`` without using it), ``"plain"`` (a module that does
            not take it) or ``"lora"``.
        folder: where the Trainer writes.
        options: training arguments.
        data: ``"list"`` or ``"stream"``.
        resumes: from this checkpoint of the folder.
        saves: the model at the end.
        callbacks: of the Trainer.
        timeout_s: of the run.
    """

    model: str = "gpt2"
    folder: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    data: str = "list"
    resumes: str | None = None
    saves: bool = False
    callbacks: tuple[TrainerCallback, ...] = ()
    timeout_s: float = 300.0


@dataclass
class Found:
    """What a process holds at the end: the model, the log, and its run."""

    state: dict[str, torch.Tensor]
    log: list[dict[str, float]]
    steps: int
    is_main: bool
    shares: tuple[float, ...] = ()

    def logged(self, name: str) -> list[float]:
        return [entry[name] for entry in self.log if name in entry]


class Sentences(Dataset[Any]):
    """Of 3 to 20 words, each the last one's successor by a step."""

    def __init__(self, samples: int = SAMPLES) -> None:
        generator = torch.Generator().manual_seed(7)
        self.rows = []
        for _ in range(samples):
            length, start, step = (
                int(torch.randint(low, high, (), generator=generator))
                for low, high in ((3, 20), (0, WORDS), (1, 4))
            )
            words = (start + step * torch.arange(length)) % WORDS
            self.rows.append({"input_ids": words.tolist(), "kind": step - 1})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.rows[index]


class Stream(IterableDataset[Any]):
    """The same, of known length."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[Any]:
        yield from Sentences().rows


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Pads to the longest; the first half of a sentence is not to be learned."""
    longest = max(len(row["input_ids"]) for row in rows)
    shape = len(rows), longest
    batch = {
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "attention_mask": torch.zeros(shape, dtype=torch.long),
        "labels": torch.full(shape, PADDING),
    }
    for index, row in enumerate(rows):
        words = torch.tensor(row["input_ids"])
        batch["input_ids"][index, : len(words)] = words
        batch["attention_mask"][index, : len(words)] = 1
        first = len(words) // 2
        batch["labels"][index, first : len(words)] = words[first:]
    return batch


def collate_kinds(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """For a model that tells the kind of a sentence."""
    batch = collate(rows)
    return {**batch, "labels": torch.tensor([row["kind"] for row in rows])}


class PlainModel(nn.Module):
    """Knows nothing of transformers; its loss is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.tell = nn.Linear(16, 3)

    def forward(
        self, input_ids: Any, attention_mask: Any, labels: Any
    ) -> dict[str, Any]:
        mask = attention_mask[..., None]
        mean = (self.embed(input_ids) * mask).sum(1) / mask.sum(1)
        logits = self.tell(mean)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def build(kind: str) -> nn.Module:
    set_seed(3)
    sizes = {"n_positions": 24, "n_embd": 16, "n_layer": 1, "n_head": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    if kind == "plain":
        return PlainModel()
    if kind == "bert":
        sizes_of_bert = BertConfig(
            vocab_size=WORDS,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        return BertForSequenceClassification(sizes_of_bert)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **ends, **NO_DROPOUT))
    if kind == "lora":
        config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(model, config)
    return model


class StopsAlone(TrainerCallback):
    """Stops the last rank after a step, and no other."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= elche.rank() == 1 and state.global_step == 3


def make(job: Job, *, plain: bool = False) -> Trainer:
    """The Trainer of a job; ``plain`` is that of transformers."""
    kinds = TrainingArguments, Trainer
    arguments, trainer = kinds if plain else (ElcheTrainingArguments, ElcheTrainer)
    options = {
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "adam_epsilon": 1e-3,  # a gradient near 0 is mostly rounding
        "lr_scheduler_type": "cosine",
        "warmup_steps": 3,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        **job.options,
    }
    hints = (1.0, 0.3) if elche.world_size() > 1 else None
    ours = (
        {}
        if plain
        else {
            "elche_config": elche.RunConfig(speed_hints=hints, timeout_s=job.timeout_s)
        }
    )
    return trainer(
        **ours,
        model=build(job.model),
        args=arguments(output_dir=job.folder, **options),
        data_collator=collate if job.model in ("gpt2", "lora") else collate_kinds,
        train_dataset=Stream() if job.data == "stream" else Sentences(),
        eval_dataset=Sentences(HELD_OUT),
        callbacks=[*job.callbacks],
    )


def train(job: Job, *, plain: bool = False) -> Found:
    """On this rank of a run, or in one process."""
    trainer = make(job, plain=plain)
    resumes = None if job.resumes is None else str(Path(job.folder) / job.resumes)
    trainer.train(resume_from_checkpoint=resumes)
    shares = () if plain else elche.epoch_metrics().shares
    found = Found(
        state={name: p.detach() for name, p in trainer.model.named_parameters()},
        log=trainer.state.log_history,
        steps=trainer.state.global_step,
        is_main=trainer.is_world_process_zero(),
        shares=shares,
    )
    if job.saves:
        trainer.save_model()
    return found


def own_loop(folder: str) -> tuple[dict[str, torch.Tensor], list[float]]:
    """A LoRA model in a loop of the user's; rank 0 saves the adapter."""
    model = build("lora")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-3)
    loader: Any = DataLoader(Sentences(), 8, shuffle=True, collate_fn=collate)
    model, optimizer, loader = elche.setup(
        model,
        optimizer,
        loader,
        weight_of=lambda batch: (batch["labels"][:, 1:] != PADDING).sum(),
    )
    losses = []
    for _ in range(2):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            elche.log_scalar("loss", loss)
        losses.append(elche.epoch_metrics().scalars["loss"])
    if elche.is_main_process():
        model.save_pretrained(folder)
    elche.shutdown()
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def loaded_adapter(folder: str) -> dict[str, torch.Tensor]:
    """The saved adapter on the network that it belongs to."""
    base = build("gpt2")
    model = PeftModel.from_pretrained(base, folder)
    return {name: p.detach() for name, p in model.named_parameters()}
