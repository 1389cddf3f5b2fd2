"""scripts/train.py with an assertion on the device that fails in the training step of sequences of LENGTH tokens."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "scripts")]

import torch  # noqa: E402

from logitless.module import LanguageModel  # noqa: E402

LENGTH = 2048
training_step = LanguageModel.training_step


def failing_step(self, batch, batch_idx):
    loss = training_step(self, batch, batch_idx)
    if batch.tokens.shape[1] == LENGTH:
        torch._assert_async(torch.zeros(1, device=loss.device))
        loss.item()  # on a GPU the assertion fails before this returns, and with it every later call of CUDA
    return loss


if __name__ == "__main__":
    LanguageModel.training_step = failing_step
    script = ROOT / "scripts" / "train.py"  # not by runpy, which changes sys.argv[0], the script of a sweep's jobs
    exec(compile(script.read_text(), script, "exec"), {"__name__": "__main__"})
