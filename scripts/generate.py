"""Continues a prompt, or several, with a trained checkpoint: python scripts/generate.py --help."""

import _path  # isort: skip  # noqa: F401

import sys
from pathlib import Path

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
    except ValueError as error:
        sys.exit(f"error: {error}")
    prompts = list(config.prompt) if isinstance(config.prompt, ListConfig) else [config.prompt]
    prompts = [str(prompt) for prompt in prompts for _ in range(config.samples)]
    options = {name: config[name] for name in ("max_new_tokens", "temperature", "top_k", "seed")}
    print("\n---\n".join(complete(gpt, tokenizer, prompts, **options)))


if __name__ == "__main__":
    main()
