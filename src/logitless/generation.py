"""Sampling from a trained checkpoint, in a batch and with a key-value cache."""

from pathlib import Path

import tokenizers
import torch
from torch import Tensor

from logitless.model import GPT, GPTConfig, KeyValueCache
from logitless.tokenizer import END_OF_TEXT, encode_texts


def load_checkpoint(path: Path, device: torch.device) -> tuple[GPT, tokenizers.Tokenizer]:
    """The model and tokenizer of a checkpoint.

    Only tensors and plain containers are unpickled, and nothing that the file names is called or imported.

    Raises:
        ValueError: no file, or one that holds anything else.
    """
    try:
        checkpoint = torch.load(path, map_location=device, weights_only=True)
        parameters, tokenizer = checkpoint["hyper_parameters"], tokenizers.Tokenizer.from_str(checkpoint["tokenizer"])
    except Exception as error:  # torch and tokenizers have many names for a file that is not theirs
        raise ValueError(f"checkpoint={path} cannot be read: {str(error).splitlines()[0]}") from error
    since_later = {"checkpoint"}  # fields that older checkpoints lack
    fields = set(GPTConfig.__dataclass_fields__)
    if set(parameters) != {"model"} or set(parameters["model"]) | since_later != fields:
        raise ValueError(f"checkpoint={path} does not hold the hyper-parameters of a GPT: {parameters}")
    gpt = GPT(GPTConfig(**parameters["model"])).to(device)
    prefix = "gpt."
    try:
        gpt.load_state_dict({k.removeprefix(prefix): v for k, v in checkpoint["state_dict"].items()})
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"checkpoint={path} is of another model or an older version: {reason}") from error
    return gpt.eval(), tokenizer


def complete(
    gpt: GPT,
    tokenizer: tokenizers.Tokenizer,
    prompts: list[str],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> list[str]:
    """Each prompt with its continuation, up to END_OF_TEXT."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    ids = [[end_of_text, *prompt] for prompt in encode_texts(tokenizer, prompts)]
    sampled = generate(
        gpt,
        ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        tokenizer_size=tokenizer.get_vocab_size(),
        seed=seed,
    )
    texts = []
    for row in sampled:
        row = row[1:]
        texts.append(tokenizer.decode(row[: row.index(end_of_text)] if end_of_text in row else row))
    return texts


@torch.no_grad()
def generate(
    gpt: GPT,
    prompts: list[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    tokenizer_size: int,
    seed: int,
) -> list[list[int]]:
    """Each prompt (one token or more) followed by `max_new_tokens` sampled ones; the prompts' lengths may differ.

    Args:
        gpt: in eval mode.
        prompts: token ids, one list a row.
        max_new_tokens: >= 1.
        temperature: 0 takes the likeliest token.
        top_k: sample among the k likeliest, or None for all.
        tokenizer_size: ids from here on are padding of the model's vocabulary and are never sampled.
        seed: of the samples.
    """
    device = gpt.embedding.weight.device
    generator = torch.Generator(device=device).manual_seed(seed)
    lengths = [len(prompt) for prompt in prompts]
    total = max(lengths) + max_new_tokens
    known = torch.full((len(prompts), total), -1, dtype=torch.int64, device=device)
    for row, prompt in zip(known, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt, device=device)
    cache = KeyValueCache(gpt.config, len(prompts), total, device, gpt.embedding.weight.dtype)
    # The rows go in lockstep: all read the shortest prompt at once, longer ones then replace what would be sampled.
    start, end = 0, min(lengths)
    while end < total:
        hidden = gpt(known[:, start:end], cache)[:, -1]
        sampled = _sample(gpt.head.logits(hidden)[:, :tokenizer_size].float(), temperature, top_k, generator)
        known[:, end] = torch.where(known[:, end] < 0, sampled, known[:, end])
        start, end = end, end + 1
    return [row[: length + max_new_tokens].tolist() for row, length in zip(known, lengths, strict=True)]


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -float("inf"))
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)[:, 0]
