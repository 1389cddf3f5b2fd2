"""The training step: the only place where model, loss and optimizer meet."""

import math
from functools import partial

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from logitless.data import Batch
from logitless.losses import LossBackend
from logitless.model import GPT, GPTConfig


class DivergedError(ArithmeticError):
    """A run whose loss or norm of the gradient is not finite."""


class LanguageModel(pl.LightningModule):
    """Trains a GPT with token-weighted means.

    The loss of a micro-batch is its sum of token losses divided by the number of kept tokens of the whole accumulation
    window over all ranks, so that accumulated gradients are those of the window's mean.

    Args:
        model: the fields of GPTConfig; all that a checkpoint's `hyper_parameters` hold, as a plain dict.
        loss_backend: the backend, with its options bound.
        optimizer_settings: `lr`, `min_lr_ratio`, `warmup_steps`, `weight_decay`, `betas`, `grad_clip` (null: none).
        log_every: optimizer steps from one logged point of the curves to the next.
        nonfinite_steps: so many in a row without a finite loss and gradient norm end the run, at a logged point.
        cuts_vocabulary: where parameters are cut over ranks, the head too is, over the vocabulary, and never whole.
        seed: for dropout. Every micro-batch seeds the generator anew, so that a resumed run draws the same masks.
    """

    def __init__(
        self,
        model: dict,
        loss_backend: LossBackend,
        optimizer_settings: dict,
        *,
        log_every: int,
        nonfinite_steps: int,
        seed: int,
        cuts_vocabulary: bool = False,
    ):
        super().__init__()
        self.save_hyperparameters("model")
        self.gpt = GPT(GPTConfig(**model))
        self.loss_backend, self.optimizer_settings = loss_backend, optimizer_settings
        self.log_every, self.nonfinite_steps, self.seed = log_every, nonfinite_steps, seed
        self.cuts_vocabulary = cuts_vocabulary
        self.tokens_seen = 0
        self.empty_windows = 0  # optimizer steps without a single kept token: loss 0, gradients 0
        self.validated_step: int | None = None
        self.losses: dict[str, float] = {}  # last and smallest train_loss and val_loss, last val_accuracy
        self.latest: dict[str, float] = {}  # values of the curves, for the progress bar
        self._point: dict[str, float | Tensor] = {}
        self._window_sum: Tensor | float = 0.0
        self._window_tokens = 0
        self._nonfinite: Tensor | int = 0  # how many of the last steps in a row; counted where the loss is
        self._logged_nonfinite: Tensor | int = 0

    def configure_model(self) -> None:
        """Cuts the parameters over the ranks of the strategy's mesh, where it has one; Lightning calls it repeatedly.

        Embedding and head, which may share a weight, are in the root's group with the last norm, whole from forward to
        backward, unless the vocabulary is cut.
        """
        if self.device_mesh is None or isinstance(self.gpt, FSDPModule):
            return
        mesh = self.device_mesh["data_parallel"]
        of_vocabulary = self.gpt.cut_vocabulary(mesh) if self.cuts_vocabulary else set()
        # In mixed precision ranks exchange a block's weights as autocast would copy them, its gradients in fp32.
        dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(self.trainer.precision)
        dtypes = {"param_dtype": dtype, "reduce_dtype": dtype and torch.float32}
        policy = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
        for block in self.gpt.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.gpt, mesh=mesh, ignored_params=of_vocabulary)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        sums = self.gpt.head(self.gpt(batch.tokens), batch.labels, self.loss_backend)
        self._window_sum = self._window_sum + sums.cross_entropy
        self._window_tokens = batch.window_tokens
        # Lightning divides by the first factor, and DDP's mean over ranks by the second.
        factor = self.trainer.accumulate_grad_batches * self.trainer.world_size
        return sums.loss * (factor / max(batch.window_tokens, 1))

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        if not self.gpt.config.dropout:
            return  # seeding the generators of all devices takes a millisecond
        accumulate = self.trainer.accumulate_grad_batches
        micro_batch = self.global_step * accumulate + batch_idx % accumulate
        # Mixed into 32 bits: a CPU generator drops the rest of its seed.
        torch.manual_seed(int(np.random.SeedSequence((self.seed, micro_batch, self.global_rank)).generate_state(1)[0]))

    def is_logging_step(self, step: int) -> bool:
        """Whether the curves get a point at optimizer step `step` = 1, 2, ..., for which values are fetched."""
        return step == 1 or step % self.log_every == 0 or step == self.trainer.max_steps

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        step = self.global_step + 1
        self.tokens_seen += self._window_tokens
        self.empty_windows += self._window_tokens == 0
        if self.is_logging_step(step):
            self.add_to_point("train/loss", self._over_ranks(self._window_sum) / max(self._window_tokens, 1))
            self.add_to_point("lr", optimizer.param_groups[0]["lr"])

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        limit = self.optimizer_settings["grad_clip"] or math.inf
        grad_norm = _whole(torch.nn.utils.clip_grad_norm_(self.gpt.parameters(), limit))
        is_scaled = self.trainer.precision == "16-mixed"  # whose gradients overflow while it looks for its scale
        is_finite = torch.isfinite(self._window_sum if is_scaled else self._window_sum + grad_norm)
        self._nonfinite = torch.where(is_finite, 0, self._nonfinite + 1)
        self._window_sum = 0.0
        if self.is_logging_step(self.global_step + 1):
            self.add_to_point("grad_norm", grad_norm)
            self._logged_nonfinite = self.trainer.strategy.reduce(self._nonfinite, reduce_op="max")

    def on_train_batch_end(self, outputs, batch: Batch, batch_idx: int) -> None:
        self.write_point()  # the callbacks' hooks have run: their values are in the point
        if self._logged_nonfinite >= self.nonfinite_steps:
            n_steps, first = self._logged_nonfinite, self.global_step - self._logged_nonfinite + 1
            raise DivergedError(f"loss or gradient norm not finite since step {first}, {n_steps} steps in a row")

    def is_finite(self) -> bool:
        """Whether all weights of all ranks are numbers, and so was the last step; waits for the device.

        All ranks must call it.
        """
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in map(Tensor.detach, self.parameters())]
        largest = torch.nn.utils.get_total_norm([part for part in parts if part.numel()], math.inf)
        is_finite = math.isfinite(largest) and not self._nonfinite
        return self.trainer.strategy.reduce_boolean_decision(is_finite, all=True)

    def on_validation_epoch_start(self) -> None:
        self._val_sum, self._val_correct, self._val_tokens = 0.0, 0.0, 0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        sums = self.gpt.head(self.gpt(batch.tokens), batch.labels, self.loss_backend)
        self._val_sum = self._val_sum + sums.cross_entropy
        self._val_correct = self._val_correct + sums.correct
        self._val_tokens += batch.window_tokens

    def on_validation_epoch_end(self) -> None:
        n_tokens = max(self._val_tokens, 1)
        val_sum, correct = (self._over_ranks(value) for value in (self._val_sum, self._val_correct))
        mean = val_sum / n_tokens
        self.validated_step = self.global_step
        self.add_to_point("val/loss", mean)
        self.add_to_point("val/accuracy", correct / n_tokens)
        perplexity = torch.as_tensor(mean, dtype=torch.float64).exp()  # inf where math.exp raises
        self.add_to_point("val/perplexity", perplexity)
        self.write_point()

    def add_to_point(self, name: str, value: float | Tensor) -> None:
        """Adds `value` to the curves' point of this step; one on the device is fetched when the point is written."""
        self._point[name] = value

    def _over_ranks(self, value: Tensor | float) -> Tensor | float:
        return self.trainer.strategy.reduce(value, reduce_op="sum")

    def write_point(self) -> None:
        """Writes the values that were added since the last one, as a row of the curves; waits for the device."""
        # Not through self.log: Lightning would write a value again at every step until it changes, and would keep it on
        # the device and fetch it from there at every step.
        if not self._point:
            return
        values = {name: float(value) for name, value in self._point.items()}
        self._point, self._logged_nonfinite = {}, int(self._logged_nonfinite)
        self.latest |= values
        for split in ("train", "val"):
            if (loss := values.get(f"{split}/loss")) is not None:
                self.losses[f"{split}_loss"] = loss
                self.losses[f"best_{split}_loss"] = min(loss, self.losses.get(f"best_{split}_loss", math.inf))
        if "val/accuracy" in values:
            self.losses["val_accuracy"] = values["val/accuracy"]
        for logger in self.trainer.loggers:
            logger.log_metrics({"tokens": self.tokens_seen, **values}, step=self.global_step)

    def configure_optimizers(self) -> dict:
        settings = self.optimizer_settings
        matrices = [p for p in self.gpt.parameters() if p.dim() >= 2]
        vectors = [p for p in self.gpt.parameters() if p.dim() < 2]
        groups = [{"params": p} | of for p, of in zip((matrices, vectors), self._group_settings(), strict=True)]
        # A fused AdamW unscales fp16 gradients inside its step, too late for clipping.
        fused = self.trainer.precision != "16-mixed"
        adamw = torch.optim.AdamW(groups, lr=settings["lr"], fused=fused)
        schedule = partial(
            warmup_cosine,
            warmup_steps=settings["warmup_steps"],
            max_steps=self.trainer.max_steps,
            min_ratio=settings["min_lr_ratio"],
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, schedule)
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def _group_settings(self) -> list[dict]:
        betas = tuple(map(float, self.optimizer_settings["betas"]))
        return [{"weight_decay": decay, "betas": betas} for decay in (self.optimizer_settings["weight_decay"], 0.0)]

    def on_train_start(self) -> None:
        # A resumed run: its own settings, not those of the checkpoint, which Lightning has restored.
        (optimizer,), (scheduling,) = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        schedule = scheduling.scheduler
        schedule.base_lrs = [self.optimizer_settings["lr"]] * len(schedule.base_lrs)
        for group, base_lr, factor, settings in zip(
            optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, self._group_settings(), strict=True
        ):
            group |= settings | {"initial_lr": base_lr, "lr": base_lr * factor(schedule.last_epoch)}

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["tokens_seen"], checkpoint["empty_windows"] = self.tokens_seen, self.empty_windows
        checkpoint["losses"], checkpoint["validated_step"] = self.losses, self.validated_step
        checkpoint["tokenizer"] = self.trainer.datamodule.tokenizer_json
        if not isinstance(self.gpt, FSDPModule):
            checkpoint["optimizer_states"] = [self._numbered_by_module(s) for s in checkpoint["optimizer_states"]]

    def _numbered_by_module(self, state: dict) -> dict:
        """An optimizer's state with its parameters numbered as the module has them, not the optimizer.

        Sharded runs number them so, and can read no other numbering; a run that is not sharded reads both.
        """
        number = {id(parameter): index for index, parameter in enumerate(self.parameters())}
        groups = self.optimizers(use_pl_optimizer=False).param_groups
        numbers = iter([number[id(parameter)] for group in groups for parameter in group["params"]])
        renamed = {old: next(numbers) for group in state["param_groups"] for old in group["params"]}
        return {
            "state": {renamed[old]: value for old, value in state["state"].items()},
            "param_groups": [g | {"params": [renamed[old] for old in g["params"]]} for g in state["param_groups"]],
        }

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.tokens_seen, self.empty_windows = checkpoint["tokens_seen"], checkpoint["empty_windows"]
        self.losses, self.validated_step = checkpoint["losses"], checkpoint["validated_step"]


def _whole(value: Tensor) -> Tensor:
    """A number of which each rank may hold a part; all ranks must call it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def warmup_cosine(step: int, *, warmup_steps: int, max_steps: int, min_ratio: float) -> float:
    """Factor of the peak learning rate at `step` = 0, 1, ...: linear up to 1, then half a cosine to `min_ratio`."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = min((step - warmup_steps) / max(max_steps - warmup_steps, 1), 1.0)
    return min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
