"""Training by libraries on top of torch: accelerate, lightning, and models of Hugging Face with random weights.

Each is a function of no arguments that every rank calls; what is not installed is skipped by the campaign.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from shared_tests.tool.realprograms.torch_programs import BATCH, FLOAT, MLP, RANKS, STEPS, D, Known, mesh, mlp

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded


@dataclass(frozen=True)
class OfLibrary(Known):
    """package: what it needs beside torch."""

    package: str


@contextmanager
def as_by_torchrun() -> Iterator[None]:
    """The variables by which libraries find out who they are."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": "0"}
    given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "shardiff"}
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def batches(ranks: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(STEPS * BATCH * ranks, D)), batch_size=BATCH)


def accelerate() -> None:
    """DDP by `Accelerator.prepare`; every step gathers the losses for a metric."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    with as_by_torchrun():
        accelerator = Accelerator(cpu=True)
        model = mlp()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, batches(dist.get_world_size()))
        for (x,) in loader:
            loss = (model(x) - x).square().mean()
            accelerator.backward(loss)
            accelerator.gather_for_metrics(loss.detach())
            optimizer.step()
            optimizer.zero_grad()


def lightning() -> None:
    """DDP by `Trainer(strategy="ddp")`; the loss is logged, summed over the ranks."""
    import lightning as L  # pyright: ignore[reportMissingImports]

    class Net(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def training_step(self, batch: Any) -> torch.Tensor:
            loss = (self.layers(batch[0]) - batch[0]).square().mean()
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=False)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 1e-3)

    with as_by_torchrun(), tempfile.TemporaryDirectory() as directory:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = L.Trainer(
            accelerator="cpu",
            strategy="ddp",
            devices=dist.get_world_size(),
            max_epochs=1,
            enable_checkpointing=False,
            default_root_dir=directory,
            **quiet,
        )
        trainer.fit(Net(), batches(dist.get_world_size()))


VOCABULARY, LLAMA_LAYERS, HIDDEN, LENGTH = 64, 2, 64, 8
LAYER = 4 * D * D + 3 * D * HIDDEN + 2 * D  # parameters: attention, a gated MLP, two gains
LLAMA = (2 * VOCABULARY * D + LLAMA_LAYERS * LAYER + D) * FLOAT


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": D, "intermediate_size": HIDDEN, "num_hidden_layers": LLAMA_LAYERS}
    config = LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, num_key_value_heads=4, **sizes)
    return LlamaForCausalLM(config)


def train(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(STEPS):
        ids = torch.randint(VOCABULARY, (2, LENGTH))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def llama_ddp() -> None:
    train(DistributedDataParallel(llama()))


def llama_fsdp2() -> None:
    """A unit for each layer, and one for the rest, which is kept since the forward pass."""
    model, over = llama(), mesh(dp=dist.get_world_size())
    for layer in model.model.layers:
        fully_shard(layer, mesh=over)
    train(fully_shard(model, mesh=over))


def llama_trainer() -> None:
    """Hugging Face's Trainer, which trains by accelerate."""
    from transformers import Trainer, TrainingArguments  # pyright: ignore[reportMissingImports]

    with as_by_torchrun(), tempfile.TemporaryDirectory() as directory:
        ids = torch.randint(VOCABULARY, (STEPS * 2 * RANKS, LENGTH))
        options: dict[str, Any] = {"report_to": [], "save_strategy": "no", "logging_strategy": "no"}
        arguments = TrainingArguments(
            directory,
            use_cpu=True,
            max_steps=STEPS,
            per_device_train_batch_size=2,
            disable_tqdm=True,
            max_grad_norm=0.0,
            ddp_backend="gloo",
            dataloader_pin_memory=False,
            **options,
        )
        Trainer(llama(), arguments, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()


def all_reduced(size: int) -> int:
    """Wire bytes of an all_reduce of so many bytes over all ranks."""
    return 2 * size * (RANKS - 1) // RANKS


LOSS, FLAG, ROTARY = FLOAT, 8, 2 * D // 4 // 2 * FLOAT  # bytes; rotary: the frequencies, twice, which are buffers
UNUSED = (9 * LLAMA_LAYERS + 3) * 4  # an int32 for each parameter tensor: whether any rank has used it
COUNTS = RANKS * 8  # an int64 from each rank: the tokens in its batch
PROGRAMS = {
    "accelerate": OfLibrary(
        accelerate,
        all_reduced(MLP) + LOSS * (RANKS - 1),
        "2 P (n-1)/n, and the gathered losses",
        "accelerate",
    ),
    "lightning": OfLibrary(
        lightning,
        all_reduced(MLP) + all_reduced(LOSS) + FLAG,
        "2 P (n-1)/n, the loss, and a broadcast of 8 B: whether to stop",
        "lightning",
    ),
    "llama_ddp": OfLibrary(
        llama_ddp,
        all_reduced(LLAMA) + ROTARY,
        "2 P (n-1)/n, and a broadcast of the buffers: the rotary frequencies",
        "transformers",
    ),
    "llama_fsdp2": OfLibrary(
        llama_fsdp2,
        (3 * LLAMA_LAYERS * LAYER + 2 * (2 * VOCABULARY * D + D)) * FLOAT * (RANKS - 1) // RANKS,
        "3 P (n-1)/n of the layers, 2 P (n-1)/n of the rest, which is kept",
        "transformers",
    ),
    "llama_trainer": OfLibrary(
        llama_trainer,
        all_reduced(LLAMA) + ROTARY + all_reduced(UNUSED) + COUNTS * (RANKS - 1) // RANKS,
        "as llama_ddp, the map of unused parameters, and the gathered numbers of tokens",
        "transformers",
    ),
}
