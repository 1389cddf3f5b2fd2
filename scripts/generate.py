"""Continues a prompt, or several, with a trained checkpoint.

python scripts/generate.py checkpoint=runs/2026-01-31_12-00-00/checkpoints/last.ckpt prompt="It is a truth"
python scripts/generate.py checkpoint=... 'prompt=[It was,She had never]' samples=3 temperature=0.9 top_k=20
python scripts/generate.py checkpoint=... 'prompt="Well, sir"'
"""

import _path  # isort: skip  # noqa: F401

import sys
from pathlib import Path
from pickle import UnpicklingError

import hydra
import torch
from omegaconf import DictConfig, ListConfig

from logitless.config import check_generate_config
from logitless.generation import complete, load_checkpoint


@hydra.main(config_path="../conf", config_name="generate", version_base="1.3")
def main(config: DictConfig) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        check_generate_config(config)
        gpt, tokenizer = load_checkpoint(Path(config.checkpoint), device)
    except (ValueError, OSError, UnpicklingError) as error:
        sys.exit(f"error: checkpoint={config.checkpoint}: {error}")
    prompts = list(config.prompt) if isinstance(config.prompt, ListConfig) else [config.prompt]
    prompts = [str(prompt) for prompt in prompts for _ in range(config.samples)]
    options = {name: config[name] for name in ("max_new_tokens", "temperature", "top_k", "seed")}
    print("\n---\n".join(complete(gpt, tokenizer, prompts, **options)))


if __name__ == "__main__":
    main()
