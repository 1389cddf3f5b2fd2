"""A script for tests of sweeps: no training, but `act` says how the job ends, at its `seq_len`.

`limit` is the longest `seq_len` with memory enough. Each job adds a line to `log`, a file.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src")]

import hydra  # noqa: E402
from hydra.core.config_store import ConfigStore  # noqa: E402
from hydra.core.hydra_config import HydraConfig  # noqa: E402
from omegaconf import DictConfig, OmegaConf  # noqa: E402

from logitless.records import FILE_NAME, append_line  # noqa: E402
from logitless.sweeper import identity  # noqa: E402

TRAIN = OmegaConf.load(ROOT / "conf" / "train.yaml")
SWEEPER = [entry for entry in TRAIN.defaults if "override hydra/sweeper" in entry]
VALUES = {"seq_len": 1024, "backend": "fused", "act": "work", "seconds": 0, "limit": None, "log": None, "seed": 1}
VALUES |= {"max_steps": 200, "val_every": 50, "val_batches": 8, "log_every": 10, "checkpoint_every": 100}
ConfigStore.instance().store(name="base", node={"hydra": TRAIN.hydra, **VALUES})
ConfigStore.instance().store(name="app", node=OmegaConf.create({"defaults": ["base", "_self_", *SWEEPER]}))
leak: list[int] = []  # state of the module, which must not pass from job to job


@hydra.main(config_path=str(ROOT / "conf"), config_name="app", version_base="1.3")
def main(config: DictConfig) -> None:
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    overrides, folder = identity(HydraConfig.get())
    leak.append(config.seq_len)
    facts = {"pid": os.getpid(), "leak": list(leak), "environment": os.environ.get("LEAK"), "overrides": overrides}
    os.environ["LEAK"] = str(config.seq_len)
    if config.log:
        with open(config.log, "a") as stream:
            stream.write(json.dumps(facts) + "\n")
    print(f"hello from {config.seq_len}", flush=True)
    if config.act == f"refused@{config.seq_len}":
        sys.exit("error: seq_len=0 must be more")
    record = {"status": "started", "overrides": overrides, "sweep": folder, "seq_len": config.seq_len}
    record |= {"config": OmegaConf.to_container(config)}
    append_line(record, run_dir / FILE_NAME)
    time.sleep(config.seconds)
    act(config)
    is_out_of_memory = config.limit is not None and config.seq_len > config.limit
    record |= {"status": "ok", "peak_live_tensor_gib": config.seq_len / 1024, "tokens_per_s": 1e4}
    if is_out_of_memory:
        record |= {"status": "oom", "step": 2, "phase": "backward", "error": "no memory"}
    append_line(record, run_dir / FILE_NAME)
    sys.exit(int(is_out_of_memory))


def act(config: DictConfig) -> None:
    """What `act` says, `act@1024` at that length only; `hold` waits while there is a file of that name."""
    what, _, length = config.act.partition("@")
    if length and int(length) != config.seq_len:
        return
    if what == "raise":
        raise RuntimeError(f"a bug at {config.seq_len}\nin two lines")
    if what.startswith("exit"):
        sys.exit(int(what[4:]))
    if what == "abort":
        os._exit(0)
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "straggle":  # a child that does not mind SIGTERM outlives the job
        subprocess.Popen(["/bin/sh", "-c", "trap '' TERM; while :; do sleep 1; done"])
        time.sleep(0.1)
    while what == "hold" and Path("hold").exists():
        time.sleep(0.02)
    if what == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        subprocess.Popen(["/bin/sleep", "1000"])
        time.sleep(1000)


if __name__ == "__main__":
    main()
