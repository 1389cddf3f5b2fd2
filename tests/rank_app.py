"""scripts/train.py, with a rank that fails at step 2, or loading, as FAIL says (`rank,how,phase`); less patient."""

import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "scripts")]

import hydra  # noqa: E402
import torch  # noqa: E402

import train  # noqa: E402  (first: it finds the rest)
from logitless import ranks  # noqa: E402
from logitless.data import TextData  # noqa: E402
from logitless.module import LanguageModel  # noqa: E402

RANK, HOW, PHASE = os.environ["FAIL"].split(",")
ranks.GRACE_S = 1.0
training_step, train_dataloader = LanguageModel.training_step, TextData.train_dataloader


def fail() -> None:
    if HOW == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise torch.OutOfMemoryError("in a test")


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, dloss):
        fail()


def failing_step(self: LanguageModel, batch, batch_idx: int) -> torch.Tensor:
    if self.global_step != 1 or PHASE == "loading":
        return training_step(self, batch, batch_idx)
    if self.global_rank != int(RANK):
        if HOW == "hangs":  # the others, as NCCL does when a rank is gone
            time.sleep(1000)
        return training_step(self, batch, batch_idx)
    if HOW == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
        return training_step(self, batch, batch_idx)
    if HOW == "stands":
        os.kill(os.getpid(), signal.SIGSTOP)
    if PHASE == "forward":
        fail()
    return FailsInBackward.apply(training_step(self, batch, batch_idx))


def failing_loader(self: TextData) -> object:
    if PHASE == "loading" and self.trainer.global_rank == int(RANK):
        os.kill(os.getpid(), signal.SIGTERM)
    return train_dataloader(self)


LanguageModel.training_step, TextData.train_dataloader = failing_step, failing_loader
main = hydra.main(config_path=str(ROOT / "conf"), config_name="train", version_base="1.3")(train.main.__wrapped__)

if __name__ == "__main__":
    main()
