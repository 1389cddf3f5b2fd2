"""Text to batches: source -> tokenizer -> one stream of token ids -> blocks of T + 1 -> (tokens, labels).

The stream is END_OF_TEXT, then each document followed by END_OF_TEXT. Blocks overlap by one token, so that every token
but the first is a label exactly once; a document's first token is predicted from the END_OF_TEXT before it, and
attention may look across it. The last block is filled up with labels of `ignore_index`. The shift by one lives in
`Blocks.row` and nowhere else.

Streams are cached in a folder whose name holds the text's fingerprint, the tokenizer and the layout above. The length
of a block is no part of it: blocks are cut from the stream as they are read.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import lightning.pytorch as pl
import numpy as np
import tokenizers
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from logitless.sources import Source
from logitless.tokenizer import END_OF_TEXT, encode_texts, from_hub, train_bpe

# A part of the cache's key: to be changed whenever what is cached changes.
LAYOUT = "end-of-text before, between and after documents; counted"


class Batch(NamedTuple):
    """tokens and labels [B, T] int64, and the number of kept labels in the whole accumulation window over all ranks."""

    tokens: Tensor
    labels: Tensor
    window_tokens: int


class Corpus(NamedTuple):
    """A tokenizer and the two streams of token ids it made, memory-mapped."""

    tokenizer: tokenizers.Tokenizer
    train: np.ndarray
    validation: np.ndarray


def load_corpus(source: Source, tokenizer_settings: dict, cache_dir: str) -> Corpus:
    """The corpus from the cache, made there first if need be. The settings are conf/tokenizer/*.yaml.

    Raises:
        RuntimeError: a data set or tokenizer that is neither cached nor within reach.
        ValueError: a split without documents.
    """
    key = hashlib.sha256(json.dumps([source.fingerprint(), tokenizer_settings, LAYOUT]).encode()).hexdigest()[:16]
    folder = Path(cache_dir).expanduser() / key
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            finished = Path(scratch) / "corpus"
            finished.mkdir()
            _write_corpus(source, tokenizer_settings, finished)
            try:
                os.rename(finished, folder)
            except OSError:
                if not folder.exists():  # else another process has just finished the same corpus
                    raise
    try:
        return _read_corpus(folder)
    except Exception as error:  # whatever a damaged file makes of itself: `tokenizers` raises a bare Exception
        raise RuntimeError(f"the cached corpus {folder} is damaged ({error}): delete that folder") from error


def _read_corpus(folder: Path) -> Corpus:
    meta = json.loads((folder / "meta.json").read_text())
    streams = []
    for split in ("train", "validation"):
        streams.append(np.memmap(folder / f"{split}.bin", dtype=meta["dtype"], mode="r"))
        if len(streams[-1]) != meta[split]:
            raise ValueError(f"{split}.bin holds {len(streams[-1])} tokens, not {meta[split]}")
    return Corpus(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), *streams)


def _write_corpus(source: Source, settings: dict, folder: Path) -> None:
    if settings["kind"] == "bpe":
        tokenizer = train_bpe(source.documents("train"), settings["vocab_size"])
    else:
        tokenizer = from_hub(settings["repo"], settings["revision"])
    # Not its own way to save, which on a full disk raises a bare Exception.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
    meta: dict[str, str | int] = {"dtype": dtype.name}
    for split in ("train", "validation"):
        with open(folder / f"{split}.bin", "wb") as stream:
            for ids in encode(source.documents(split), tokenizer):
                stream.write(ids.astype(dtype).tobytes())
            meta[split] = stream.tell() // dtype.itemsize
        if meta[split] < 2:
            raise ValueError(f"data.validation={source.validation} leaves no document for the {split} split")
    (folder / "meta.json").write_text(json.dumps(meta))


def encode(documents: Iterable[str], tokenizer: tokenizers.Tokenizer) -> Iterator[np.ndarray]:
    """The stream of token ids of all documents, in pieces."""
    end_of_text = tokenizer.token_to_id(END_OF_TEXT)
    yield np.array([end_of_text])
    documents = iter(documents)
    while group := list(islice(documents, 256)):
        for ids in encode_texts(tokenizer, group):
            yield np.array([*ids, end_of_text])


class Blocks:
    """Rows of T tokens and their labels, cut from a stream.

    Args:
        stream: [n] token ids, n >= 2.
        seq_len: T.
        vocab: V; a block with an id outside [0, V) raises ValueError.
        ignore_index: label of what fills the last row.
    """

    def __init__(self, stream: np.ndarray, seq_len: int, vocab: int, ignore_index: int):
        if len(stream) < 2:
            raise ValueError(f"a stream of {len(stream)} tokens has nothing to predict")
        self.stream, self.seq_len, self.vocab, self.ignore_index = stream, seq_len, vocab, ignore_index

    def __len__(self) -> int:
        return -(-(len(self.stream) - 1) // self.seq_len)

    def row(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [T], labels [T]), both int64: label i is the token after token i."""
        start = index * self.seq_len
        block = self.stream[start : start + self.seq_len + 1].astype(np.int64)
        outside = block[(block < 0) | (block >= self.vocab)]
        if outside.size:
            raise ValueError(f"token id {outside[0]} does not fit model.padded_vocab_size={self.vocab}")
        tokens, labels = self.empty_row()
        tokens[: len(block) - 1], labels[: len(block) - 1] = block[:-1], block[1:]
        return tokens, labels

    def empty_row(self) -> tuple[np.ndarray, np.ndarray]:
        """A row whose labels do not count, for a rank that has none left where others have."""
        labels = np.full(self.seq_len, self.ignore_index, dtype=np.int64)
        return np.zeros(self.seq_len, dtype=np.int64), labels

    def n_kept(self, indices: Iterable[int]) -> int:
        """Number of labels that count in the loss of these rows."""
        return sum(int((self.row(index)[1] != self.ignore_index).sum()) for index in indices)


class Batches(Dataset):
    """Micro-batch number m of the whole run, a function of m alone, so that a resumed run reads on where it stopped.

    The rows of all epochs form one endless sequence, each epoch in an order drawn from its own seed (or in file order
    if `seed` is None). Micro-batch m of rank r is its slice number m * world + r of `batch_size` rows. `accumulate`
    micro-batches of all ranks are a window, the tokens of one optimizer step.
    """

    def __init__(
        self,
        blocks: Blocks,
        batch_size: int,
        *,
        n_batches: int,
        accumulate: int = 1,
        seed: int | None = None,
        rank: int = 0,
        world: int = 1,
    ):
        self.blocks, self.batch_size, self.n_batches = blocks, batch_size, n_batches
        self.accumulate, self.seed, self.rank, self.world = accumulate, seed, rank, world
        self._epoch_order = lru_cache(maxsize=2)(self._draw_epoch_order)
        self._window_tokens = lru_cache(maxsize=2)(self._count_window_tokens)

    def __len__(self) -> int:
        return self.n_batches

    def __getitem__(self, micro_batch: int) -> Batch:
        rows = [self.blocks.row(index) for index in self._rows(micro_batch * self.world + self.rank)]
        # All ranks' batches have one shape.
        rows += [self.blocks.empty_row()] * ((self.batch_size if self.world > 1 else 1) - len(rows))
        tokens, labels = (torch.from_numpy(np.stack(part)) for part in zip(*rows, strict=True))
        return Batch(tokens, labels, self._window_tokens(micro_batch // self.accumulate))

    def _rows(self, slice_index: int) -> list[int]:
        start = slice_index * self.batch_size
        positions = range(start, start + self.batch_size)
        if self.seed is None:
            return [p for p in positions if p < len(self.blocks)]
        return [self._epoch_order(p // len(self.blocks))[p % len(self.blocks)] for p in positions]

    def _draw_epoch_order(self, epoch: int) -> list[int]:
        # Not torch's generator: on a CPU it reads the lower 32 bits of its seed, too few for a seed and an epoch.
        return np.random.default_rng((self.seed, epoch)).permutation(len(self.blocks)).tolist()

    def _count_window_tokens(self, window: int) -> int:
        per_window = self.accumulate * self.world
        slices = range(window * per_window, (window + 1) * per_window)
        return sum(self.blocks.n_kept(self._rows(index)) for index in slices)


class TextData(pl.LightningDataModule):
    """The loaders of one run.

    Args:
        corpus: tokenizer and streams.
        vocab: V of the model.
        seq_len: T.
        batch_size: B, rows a micro-batch and a rank.
        accumulate: micro-batches an optimizer step.
        max_steps: optimizer steps of the run.
        val_batches: validation batches of all ranks together, fewer if the validation stream is shorter.
        ignore_index: label that does not count.
        seed: of the order of the rows.
        pin_memory: for copies to a GPU that nothing waits for.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        vocab: int,
        seq_len: int,
        batch_size: int,
        accumulate: int,
        max_steps: int,
        val_batches: int,
        ignore_index: int,
        seed: int,
        pin_memory: bool = False,
    ):
        super().__init__()
        self.tokenizer_json = corpus.tokenizer.to_str()
        held_out = corpus.validation[: val_batches * batch_size * seq_len + 1]
        train, self._held_out = (Blocks(s, seq_len, vocab, ignore_index) for s in (corpus.train, held_out))
        self.batch_size, self.pin_memory = batch_size, pin_memory
        n_batches = max_steps * accumulate
        self._train = partial(Batches, train, batch_size, n_batches=n_batches, accumulate=accumulate, seed=seed)

    def train_dataloader(self) -> DataLoader:
        batches = self._train(rank=self.trainer.global_rank, world=self.trainer.world_size)
        start = self.trainer.global_step * batches.accumulate  # > 0 in a resumed run
        left = _Resumed(range(start, len(batches)), len(batches))
        return DataLoader(batches, batch_size=None, sampler=left, pin_memory=self.pin_memory)

    def val_dataloader(self) -> DataLoader:
        rank, world = self.trainer.global_rank, self.trainer.world_size
        n_batches = -(-len(self._held_out) // (self.batch_size * world))  # of every rank: all compute together
        batches = Batches(self._held_out, self.batch_size, n_batches=n_batches, rank=rank, world=world)
        return DataLoader(batches, batch_size=None, pin_memory=self.pin_memory)


class _Resumed:
    """Iterates over what is left of a run, but has the length of all of it, which is what Lightning counts against."""

    def __init__(self, left: range, length: int):
        self.left, self.length = left, length

    def __iter__(self) -> Iterator[int]:
        return iter(self.left)

    def __len__(self) -> int:
        return self.length
