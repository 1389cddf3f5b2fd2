"""Predicts the peak memory of training steps before any runs, and the longest sequences that fit, for each backend.

    python scripts/plan.py --model small --device "NVIDIA H200" --seq-len 1024,4096,16384,65536 --batch-size 1
    python scripts/plan.py --model small --device 4090 --seq-len 1024,8192 --chunk auto --budget-mib 200
    python scripts/plan.py --model small --device H200 --seq-len 8192,65536 --checkpoint --memory-limit-gib 24

Needs no GPU. A part of a device's name will do if no other has it. What is not given is as in conf/. Peaks are GiB =
2**30 bytes of tensors; a twentieth of the device is left to the allocator and the context, or 1.5% of a limit. The plan
of fused has the predicted time of the head in forward and backward. Whether a library takes more than 2**31 logits is
another question.
"""

import _path  # isort: skip

import argparse

import hydra

from kernels.devices import Device, measured_device
from kernels.plan import MIB
from logitless.config import check_train_config, resolved_precision
from logitless.footprint import BACKENDS, GIB, find_device, fits, longest, peak_bytes, usable_bytes
from logitless.footprint_parts import Step, head_plan
from logitless.model import GPTConfig, padded_vocab_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny", help="a file of conf/model (tiny)")
    parser.add_argument(
        "--device", required=True, help="a name in kernels.devices, or a part of one; or `present`, measured now"
    )
    parser.add_argument("--seq-len", required=True, help="tokens a sequence: lengths, separated by commas")
    parser.add_argument("--batch-size", help="sequences a step")
    parser.add_argument("--precision", help="32-true, bf16-mixed, 16-mixed, bf16-true or auto")
    parser.add_argument("--chunk", help="rows of logits alive at once in fused, or auto")
    parser.add_argument("--budget-mib", help="most MiB that fused may need beyond its gradients")
    parser.add_argument("--vocab", help="classes, a multiple of 64")
    parser.add_argument("--checkpoint", action="store_const", const="true", help="recompute the blocks in backward")
    parser.add_argument("--memory-limit-gib", help="most GiB that the allocator may take")
    arguments = vars(parser.parse_args())
    try:
        steps = [step(arguments | {"seq_len": length}) for length in arguments["seq_len"].split(",")]
    except (ValueError, hydra.errors.HydraException) as error:
        parser.error(str(error))
    print(table(steps))


def step(arguments: dict[str, str | None]) -> Step:
    """What is asked for; with the values of conf/ where nothing is, and by its rules."""
    keys = {"vocab": "model.padded_vocab_size", "checkpoint": "model.checkpoint"}
    given = {name: value for name, value in arguments.items() if name != "device" and value is not None}
    with hydra.initialize_config_dir(str(_path.ROOT / "conf"), version_base="1.3"):
        config = hydra.compose("train", [f"{keys.get(name, name)}={value}" for name, value in given.items()])
    check_train_config(config)
    vocab = config.model.padded_vocab_size or padded_vocab_size(None, config.tokenizer.vocab_size)
    device = device_of(arguments["device"])
    precision = resolved_precision(config.precision, on_gpu=device.name != "cpu")
    model = GPTConfig(**{**config.model, "padded_vocab_size": vocab})
    limits = config.chunk, config.budget_mib, config.memory_limit_gib
    return Step(model, device, config.seq_len, config.batch_size, precision, *limits)


def device_of(name: str) -> Device:
    """One by its name, or what is here, with rates measured now."""
    return measured_device() if name == "present" else find_device(name)


def table(steps: list[Step]) -> str:
    """A line for each length, then one for each backend."""
    first = steps[0]
    checkpoint = ", activation checkpointing" if first.model.checkpoint else ""
    lines = [
        f"{first.device.name}, {usable_bytes(first) / GIB:.1f} GiB usable; {first.precision}, batch size "
        f"{first.batch_size}, V = {first.model.padded_vocab_size}{checkpoint}; peaks in GiB",
        f"{'seq_len':>8}" + "".join(f"{name:>22}" for name in BACKENDS) + "  plan of fused",
    ]
    lines += [f"{step.seq_len:>8}{cells(step)}" for step in steps]
    for name in BACKENDS:
        refused = min((step.seq_len for step in steps if not fits(step, name)), default="none")
        lines.append(f"{name:8} first of these that does not fit: {refused}; longest that fits: {longest(first, name)}")
    return "\n".join(lines)


def cells(step: Step) -> str:
    try:
        plan = head_plan(step)
        transient = f"{plan.transient_bytes / MIB:,.0f} MiB transient"
        text = f"{plan.schedule}, chunk {plan.chunk}, {transient}, {plan.predicted_ms:.2f} ms"
        backends = BACKENDS
    except ValueError as error:  # the budget
        text, backends = str(error), BACKENDS[:-1]
    peaks = [f"{peak_bytes(step, name) / GIB:,.2f}" + " does not fit" * (not fits(step, name)) for name in backends]
    return "".join(f"{peak:>22}" for peak in [*peaks, "none"][: len(BACKENDS)]) + f"  {text}"


if __name__ == "__main__":
    main()
