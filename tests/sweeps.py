"""Records of made-up sweeps, with the peaks that `footprint` predicts, give or take a hundredth."""

import json
import math
from dataclasses import replace
from pathlib import Path

from kernels.devices import DEVICES
from logitless.footprint import longest, peak_bytes
from logitless.footprint_parts import Step
from logitless.model import GPTConfig

GIB = 2**30
SMALL = GPTConfig(12, 12, 768, 50304, "gelu", tied=True, head_bias=False, dropout=0.0)
VERSIONS = {"python": "3.12", "torch": "2.11.0", "triton": "3.6.0", "lightning": "2.6.6"}
BACKENDS = ("naive", "inplace", "fused")


def record_of(backend: str, seq_len: int, chunk: int | None = None, **more) -> dict:
    """A run that ended ok; `more` replaces and adds keys, `config` adds to the configuration."""
    config = {"seq_len": seq_len, "batch_size": 1, "accumulate": 1, "max_steps": 3, "chunk": 1024, "seed": 1}
    config |= {"model": dict(vars(SMALL)), "loss": {"_target_": f"logitless.losses.{backend}"}, "memory_limit_gib": 24}
    config |= more.pop("config", {})
    command = f"model=small loss={backend} seq_len={seq_len} memory_limit_gib=24 hydra.run.dir=runs/x"
    record = {"status": "ok", "time": "2026-12-01T10:00:00+00:00", "command": command, "commit": "0123456789ab"}
    record |= {"config": config, "versions": VERSIONS, "device": "NVIDIA H200", "backend": backend, "chunk": chunk}
    record |= {"precision": "bf16-mixed", "seq_len": seq_len, "batch_size": 1, "memory_limit_gib": 24, "steps": 3}
    record |= {"tokens": 3 * seq_len, "tokens_per_s": 1.5e5 / (1 + seq_len / 40000), "train_loss": 9.5, "val_loss": 9.4}
    return record | {"curves": "curves/metrics.csv"} | more


def write(folder: Path, record: dict, n_points: int = 3) -> None:
    """A run's folder, with curves that fall."""
    (folder / "curves").mkdir(parents=True)
    (folder / "record.jsonl").write_text(json.dumps({"status": "started"}) + "\n" + json.dumps(record) + "\n")
    lines = ["step,tokens,train/loss,val/loss"]
    for step in range(1, n_points + 1):
        loss = 4 + 6 * math.exp(-step / 20) + 0.02 * math.sin(step * 1.7)
        val = f"{loss + 0.2:.4f}" if step % 5 == 0 else ""
        lines.append(f"{step},{step * record['seq_len']},{loss:.4f},{val}")
    (folder / "curves" / "metrics.csv").write_text("\n".join(lines) + "\n")


def write_frontier(folder: Path, vocab: int, backends: tuple[str, ...] = BACKENDS, limit_gib: float = 24.0) -> None:
    """What a frontier search with a limit leaves: doubled lengths, then bisected ones, ok or oom as predicted."""
    model, job = replace(SMALL, padded_vocab_size=vocab), 0
    for backend in backends:
        known = backend if backend in BACKENDS else "inplace"
        chunk = 1024 if backend == "fused" else None
        step = Step(model, DEVICES["NVIDIA H200"], 1, 1, "bf16-mixed", chunk or "auto")
        device = replace(step.device, memory_bytes=int(limit_gib * GIB / 0.95))
        edge = longest(replace(step, device=device), known)
        lengths = [1024 * 2**i for i in range(9) if 1024 * 2**i < 2 * edge]
        lengths += [round(edge * share / 128) * 128 for share in (0.9, 1.1)]
        for length in dict.fromkeys(lengths):
            peak = peak_bytes(replace(step, seq_len=length), known) / GIB * 1.008
            facts = {"peak_allocated_gib": peak}
            if length > edge:
                facts = {"status": "oom", "step": 1 + job % 2, "phase": "backward", "steps": job % 2}
                facts |= {"cold_peak_allocated_gib": 0.9 * limit_gib, "error": "OutOfMemoryError: CUDA"}
                facts |= {"tokens_per_s": None, "train_loss": None, "val_loss": None}
            config = {"model": dict(vars(model)), "memory_limit_gib": limit_gib}
            facts |= {"config": config, "memory_limit_gib": limit_gib}
            write(folder / str(job), record_of(backend, length, chunk, **facts))
            job += 1
