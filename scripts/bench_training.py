"""Times training steps of this recipe beside those of nanoGPT (github.com/karpathy/nanoGPT), in turn, on one GPU.

    python scripts/bench_training.py --nanogpt ../nanoGPT --shapes 64x1024x50304,16x4096x50304,32x1024x131072
    python scripts/bench_training.py --shapes 64x1024x50304 --ours "loss=fused chunk=8192" --ours loss=naive

A shape is sequences x tokens x vocabulary, for 12 layers of width 768. nanoGPT is timed as its bench.py does: compiled,
bf16 autocast, fused AdamW, 10 steps to warm up and 20 that count, with the loss fetched at each. Ours is a run of
scripts/train.py with model=small, compile=true and the overrides given: clipped gradients, its own loader, Lightning,
the loss fetched every 10 steps; as many steps count, and 5 more are profiled. Each has a process of its own. Prints a
row for each, and appends it to --out. The overrides must not set max_steps, val_every, log_every or profile.
"""

import _path  # isort: skip  # noqa: F401

import argparse
import csv
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from logitless.memory import GIB
from logitless.profiling import N_STEPS
from logitless.records import append_line, read_record

N_LAYERS, N_HEADS, WIDTH = 12, 12, 768
WARMUP, STEPS = 10, 20
NANOGPT = "nanoGPT"


class Shape(NamedTuple):
    """Sequences a step, tokens a sequence, classes."""

    batch_size: int
    seq_len: int
    vocab: int


def nanogpt_row(folder: str, shape: Shape) -> dict:
    """For a process of its own: what nanoGPT, cloned in `folder`, reaches."""
    sys.path.insert(0, folder)
    import torch
    from model import GPT, GPTConfig  # nanoGPT's

    torch.manual_seed(1337)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    sizes = {"n_layer": N_LAYERS, "n_head": N_HEADS, "n_embd": WIDTH, "dropout": 0.0, "bias": False}
    model = GPT(GPTConfig(block_size=shape.seq_len, vocab_size=shape.vocab, **sizes)).cuda()
    optimizer = model.configure_optimizers(1e-2, 1e-4, (0.9, 0.95), "cuda")
    compiled = torch.compile(model)
    tokens, labels = torch.randint(shape.vocab, (2, shape.batch_size, shape.seq_len), device="cuda")

    def step() -> float:
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = compiled(tokens, labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(WARMUP):
        step()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    speed = STEPS * tokens.numel() / (time.perf_counter() - start)
    row = {"method": NANOGPT, "tokens_per_s": speed, "peak_allocated_gib": torch.cuda.max_memory_allocated() / GIB}
    return row | {"device": torch.cuda.get_device_name(), "versions": {"torch": torch.__version__}}


def our_row(overrides: str, shape: Shape) -> dict:
    n_steps = WARMUP + STEPS + N_STEPS  # the last are profiled
    command = [sys.executable, str(Path(__file__).with_name("train.py")), "model=small", "compile=true"]
    command += [f"batch_size={shape.batch_size}", f"seq_len={shape.seq_len}", "logger=csv", "checkpoint_every=null"]
    command += [f"model.padded_vocab_size={shape.vocab}", f"max_steps={n_steps}", f"val_every={n_steps}"]
    command += ["val_batches=1", "profile=true", f"log_every={WARMUP}", *overrides.split()]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*command, f"hydra.run.dir={folder}"], check=True, stdout=subprocess.DEVNULL)
        record = read_record(Path(folder))
        with open(Path(folder) / record["curves"]) as stream:
            points = [row for row in csv.DictReader(stream) if row["tokens_per_s"] and int(row["step"]) > WARMUP]
    speed = statistics.harmonic_mean(float(point["tokens_per_s"]) for point in points)
    names = ("peak_allocated_gib", "step_ms", "start_up_s", "flops_per_token", "device", "versions", "commit")
    mfu = record["mfu"] and record["mfu"] * speed / record["tokens_per_s"]
    return {"method": overrides, "tokens_per_s": speed, "mfu": mfu} | {name: record[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", required=True, help="sequences x tokens x vocabulary, with commas between them")
    parser.add_argument("--nanogpt", type=Path, help="folder of a clone of nanoGPT; without it ours alone is timed")
    parser.add_argument("--ours", action="append", help="overrides of a run, once or more: loss=fused chunk=8192")
    parser.add_argument("--out", type=Path, help="file of JSON lines to append to")
    arguments = parser.parse_args()
    methods = [NANOGPT] * bool(arguments.nanogpt) + (arguments.ours or ["loss=fused chunk=8192"])
    for text in arguments.shapes.split(","):
        shape = Shape(*map(int, text.split("x")))
        print(f"\n{text}: sequences x tokens x vocabulary\n{'ms a step':>10} {'tokens/s':>10} {'peak GiB':>9}  method")
        for method in methods:
            if method == NANOGPT:
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    row = pool.apply(nanogpt_row, (str(arguments.nanogpt.resolve()), shape))
            else:
                row = our_row(method, shape)
            row = {"shape": text} | row
            speed, peak = row["tokens_per_s"], row["peak_allocated_gib"]
            ms = 1e3 * shape.batch_size * shape.seq_len / speed
            print(f"{ms:10.1f} {speed:10,.0f} {peak:9.2f}  {method}", flush=True)
            if arguments.out:
                append_line(row, arguments.out)


if __name__ == "__main__":
    main()
