"""Tokenizers: a byte-level BPE trained on the text at hand, or one from the Hugging Face hub."""

from collections.abc import Iterable, Iterator

import tokenizers

from logitless.hub import use_hub_cache_when_offline

END_OF_TEXT = "<|endoftext|>"
TRAINING_CHARACTERS = 20_000_000  # a larger sample changes few of 8192 merges and costs minutes


def train_bpe(documents: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """A byte-level BPE of `vocab_size` ids or fewer, deterministic, whose round trip is exact; END_OF_TEXT is id 0."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first_characters(documents, TRAINING_CHARACTERS), trainer)
    return tokenizer


def from_hub(repo: str, revision: str) -> tokenizers.Tokenizer:
    """The tokenizer of a hub repository, which must know END_OF_TEXT. Raises RuntimeError if it is out of reach."""
    use_hub_cache_when_offline()
    try:
        tokenizer = tokenizers.Tokenizer.from_pretrained(repo, revision=revision)
    except Exception as error:  # `tokenizers` raises a bare Exception when the hub is out of reach
        raise RuntimeError(
            f"tokenizer.repo={repo} (revision {revision}) could not be loaded, nor is it in the hub's cache: {error}. "
            "Run once with network, or use tokenizer=bpe8k"
        ) from error
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise ValueError(f"tokenizer.repo={repo} has no {END_OF_TEXT} token to end documents with")
    return tokenizer


def encode_texts(tokenizer: tokenizers.Tokenizer, texts: list[str]) -> list[list[int]]:
    """Token ids of each text; an END_OF_TEXT that somebody wrote is text like any other."""
    tokenizer.encode_special_tokens = True
    return [encoding.ids for encoding in tokenizer.encode_batch(texts, add_special_tokens=False)]


def _first_characters(documents: Iterable[str], limit: int) -> Iterator[str]:
    for document in documents:
        yield document[:limit]
        limit -= len(document)
        if limit <= 0:
            return
