"""Where the milliseconds of an optimizer step go, by the part of the model that spends them."""

import gc
import re
import time
from collections.abc import Sequence

import lightning.pytorch as pl
import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from logitless.footprint_parts import inner_width, up_width
from logitless.memory import silent_stderr
from logitless.model import GPTConfig

N_STEPS = 5
GEMMS = {"aten::mm", "aten::addmm"}
# The first that is found in an operator's name, its kernel's, or those of the operators that called it.
BY_NAME = {
    "communication": r"nccl|gloo|c10d|all_?gather|reduce_?scatter|all_?reduce",
    "optimizer, clipping": r"_fused_adamw|_foreach|linalg_vector_norm",  # Lightning trains inside of its step
    "head, loss": r"logitless::|log_softmax|logsoftmax|nll_?loss",
    "attention": r"scaled_dot_product|_flash_attention|_efficient_attention|_cudnn_attention",
    "embedding": r"embedding|index_put",
    "MLP": r"gelu|silu|swish|sigmoid",
}
# A call of the driver. Its number, where no operator made it, may also be that of an operator.
DRIVER = re.compile(r"(cu|cuda|hip)[A-Z]")
ELEMENTWISE = "norms, rotary, residuals, casts"


class StepProfile(pl.Callback):
    """Profiles the `N_STEPS` optimizer steps before the first validation, or before the end of a shorter run.

    Not step 1, unless there is no other; of a resumed run those after its first.

    `milliseconds` then holds the mean of a step for each part: of kernels on a GPU, of operators on a CPU. `idle` is
    what their sum leaves of the step: too little where kernels run at once, as communication does, and on a CPU without
    the time that Python takes inside the optimizer's step. Profiling changes the steps' pace.

    Args:
        model: its shape tells one product from another.
        last_step: the optimizer step 1, 2, ... that is the last to be profiled.
    """

    def __init__(self, model: GPTConfig, last_step: int):
        self.model, self.last_step = model, last_step
        self.milliseconds: dict[str, float] = {}
        self._profile: profile | None = None
        self._n_before = 0  # steps of the run that a resumed one goes on from

    def on_train_start(self, trainer, module) -> None:
        if trainer.global_step:  # a resumed run
            self._n_before = trainer.global_step
            self.last_step = min(trainer.global_step + 1 + N_STEPS, trainer.max_steps)

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if self._profile is None and self.covers(trainer.global_step):
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if module.device.type == "cuda" else [])]
            self._profile = profile(activities=activities, record_shapes=True)
            with silent_stderr():
                self._profile.start()
            self._start, self._first = self._now(module), trainer.global_step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        if self._profile is None or trainer.global_step < self.last_step:
            return
        seconds = self._now(module) - self._start
        with silent_stderr():
            self._profile.stop()
        n_steps = trainer.global_step - self._first
        spent = microseconds(self._profile.events(), self.model)
        self.milliseconds = {part: value / 1e3 / n_steps for part, value in spent.items()}
        self._profile = None  # in a cycle, it holds on to parameters, which FSDP may swap
        gc.collect()
        self.milliseconds["idle"] = max(1e3 * seconds / n_steps - sum(self.milliseconds.values()), 0.0)

    def covers(self, n_done: int) -> bool:
        """Whether the step after `n_done` steps is profiled. Not the first, which compiles, unless no other is."""
        return max(self.last_step - N_STEPS, min(self.last_step - 1, self._n_before + 1)) <= n_done < self.last_step

    @staticmethod
    def _now(module: pl.LightningModule) -> float:
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        return time.perf_counter()


def microseconds(events: Sequence[FunctionEvent], model: GPTConfig) -> dict[str, float]:
    """Microseconds of each part, the largest first: of the kernels that operators launched, or of these on a CPU."""
    uses_gpu = any(event.kernels for event in events)
    spent: dict[str, float] = {}
    counted: set[int] = set()
    for event in events:
        # The profiler lists an operator's kernels under each event that has its number: also under what held it up.
        if DRIVER.match(event.name) or event.id in counted:
            continue
        if event.kernels:
            counted.add(event.id)
        stack = [event]
        while stack[-1].cpu_parent is not None:
            stack.append(stack[-1].cpu_parent)
        names = [each.name for each in stack]
        shapes = next((each.input_shapes for each in stack if each.name in GEMMS), None)
        times = [(k.name, k.duration) for k in event.kernels] if uses_gpu else [("", event.self_cpu_time_total)]
        for kernel, duration in times:
            part = part_of([kernel, *names], shapes, model)
            spent[part] = spent.get(part, 0.0) + duration
    return dict(sorted(spent.items(), key=lambda item: -item[1]))


def part_of(names: Sequence[str], gemm_shapes: list | None, model: GPTConfig) -> str:
    """The part of the model that a kernel belongs to.

    Args:
        names: of the kernel, its operator, and the operators that called this, from the inside.
        gemm_shapes: of the operands, if the operator is a product of matrices.
        model: the widths, which tell which product it is, unless there are D or 2 D tokens in a micro-batch, 2 D
            classes, or as many of either as the MLP is wide.
    """
    text = " ".join(names).lower()
    for part, pattern in BY_NAME.items():
        if re.search(pattern, text):
            return part
    if gemm_shapes is None:
        return ELEMENTWISE
    left, right = [shape for shape in gemm_shapes if len(shape) == 2][:2]
    sizes = [*left, right[1]]  # of the matrix, and the number of tokens, in any order
    if 2 * model.width in sizes or sizes.count(model.width) == 2:
        return "attention's projections"
    return "MLP" if {inner_width(model), up_width(model)} & {*sizes} else "head, loss"  # of V classes, or of a rank's
