import json
import shutil
import socket
import threading
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch

from logitless import data, losses
from logitless.data import Batches, Blocks, Corpus, TextData, encode, load_corpus
from logitless.sources import HubDataset, TextFiles
from logitless.tokenizer import END_OF_TEXT

IGNORE = -100
BPE = {"kind": "bpe", "vocab_size": 280}
BACKENDS = {"naive": losses.naive, "inplace": losses.inplace, "fused": partial(losses.fused, chunk=3)}


def words_tokenizer(words: list[str]) -> tokenizers.Tokenizer:
    """One id a word, in their order, after END_OF_TEXT."""
    vocab = {word: index for index, word in enumerate([END_OF_TEXT, *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return tokenizer


def text_data(train, validation=(0, 1, 2), *, step: int = 0, rank: int = 0, world: int = 1, **options) -> TextData:
    """A data module over two streams, attached to what it reads of a trainer."""
    corpus = Corpus(words_tokenizer(["a"]), *(np.asarray(stream) for stream in (train, validation)))
    defaults = {"vocab": 4096, "seq_len": 4, "batch_size": 1, "accumulate": 1, "max_steps": 1, "val_batches": 10**6}
    module = TextData(corpus, **defaults | {"ignore_index": IGNORE, "seed": 1} | options)
    module.trainer = SimpleNamespace(global_step=step, global_rank=rank, world_size=world)
    return module


def row_starts(batch) -> list[int]:
    """Which rows of a stream 0, 1, 2, ... are in a batch."""
    return batch.tokens[:, 0].tolist()


# Shift and packing


def test_the_label_is_the_next_token_and_the_shift_happens_once():
    (batch,) = text_data(range(8), seq_len=7).train_dataloader()
    assert batch.tokens.tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert batch.labels.tolist() == [[1, 2, 3, 4, 5, 6, 7]]
    assert batch.window_tokens == 7
    assert batch.tokens.dtype == batch.labels.dtype == torch.int64


def test_two_documents_make_one_stream_with_end_of_text_around_each():
    tokenizer = words_tokenizer(["a", "b", "c", "d", "e", "f", "g", "h"])
    stream = np.concatenate(list(encode(["a b c d e", "f g h"], tokenizer)))
    assert stream.tolist() == [0, 1, 2, 3, 4, 5, 0, 6, 7, 8, 0]
    blocks = Blocks(stream, 4, 64, IGNORE)
    tokens, labels = zip(*((part.tolist() for part in blocks.row(i)) for i in range(len(blocks))), strict=True)
    assert labels == ([1, 2, 3, 4], [5, 0, 6, 7], [8, 0, IGNORE, IGNORE])
    assert [row[:2] for row in tokens] == [[0, 1], [4, 5], [7, 8]]
    assert tokens[1] == [4, 5, 0, 6]  # a document's first token is predicted from the end of the one before


def test_an_end_of_text_that_somebody_wrote_is_text(text, cache):
    """It must neither end a document nor vanish when decoded."""
    corpus = load_corpus(source_of(text), BPE, cache)
    written = f"before {END_OF_TEXT} after"
    (_, ids) = encode([written], corpus.tokenizer)
    assert (ids == corpus.tokenizer.token_to_id(END_OF_TEXT)).tolist() == [False] * (len(ids) - 1) + [True]
    assert corpus.tokenizer.decode(ids.tolist()) == written


def test_more_documents_than_a_group_come_in_order():
    words = [f"w{i}" for i in range(600)]
    stream = np.concatenate(list(encode(iter(words), words_tokenizer(words))))
    assert stream[1::2].tolist() == list(range(1, 601))
    assert not stream[0::2].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_oracle_of_the_next_token_has_no_loss_and_a_double_shift_would_cost_50(backend):
    vocab = 64
    (batch,) = text_data(range(30), vocab=vocab, seq_len=29).train_dataloader()
    tokens, labels = batch.tokens.flatten(), batch.labels.flatten()
    hidden = 50.0 * torch.nn.functional.one_hot(tokens + 1, vocab).float()  # logits, as the weight is the identity
    loss = partial(BACKENDS[backend], hidden, torch.eye(vocab))
    assert float(loss(labels).loss) / 29 < 1e-6
    twice = torch.cat([labels[1:], torch.tensor([IGNORE])])
    assert float(loss(twice).loss) / 28 == pytest.approx(50, abs=1e-3)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 16, 100])
def test_every_token_but_the_first_is_a_label_exactly_once(seq_len):
    generator = np.random.default_rng(seq_len)
    for length in [2, 3, 8, 15, 16, 17, 18, 97, 101]:
        stream = generator.integers(0, 50, length).astype(np.uint16)
        blocks = Blocks(stream, seq_len, 50, IGNORE)
        rows = [blocks.row(i) for i in range(len(blocks))]
        tokens, labels = (np.concatenate(part) for part in zip(*rows, strict=True))
        kept = labels != IGNORE
        assert labels[kept].tolist() == stream[1:].tolist()
        assert tokens[kept].tolist() == stream[:-1].tolist()
        assert kept[: length - 1].all()  # only the end of the last row is filled up
        assert all((label != IGNORE).any() for _, label in rows)
        assert blocks.n_kept(range(len(blocks))) == length - 1
        assert all(part.dtype == np.int64 and part.shape == (seq_len,) for row in rows for part in row)


def test_what_fills_the_last_row_carries_the_given_ignore_index():
    _, labels = Blocks(np.arange(4), 5, 64, -7).row(0)
    assert labels.tolist() == [1, 2, 3, -7, -7]


def test_a_stream_without_a_label_is_refused():
    for length in (0, 1):
        with pytest.raises(ValueError, match=f"a stream of {length} tokens has nothing to predict"):
            Blocks(np.arange(length), 4, 64, IGNORE)


@pytest.mark.parametrize("wrong", [64, 65, 2**31, 2**32 - 1, -1, -100])
@pytest.mark.parametrize("position", [0, 7, 20])
def test_an_id_outside_the_vocabulary_never_leaves_the_data_module(wrong, position):
    stream = np.arange(21)
    stream[position] = wrong
    module = text_data(stream, stream, vocab=64, max_steps=5)
    for loader in (module.train_dataloader(), module.val_dataloader()):
        seen = []
        with pytest.raises(ValueError, match=r"does not fit model\.padded_vocab_size=64"):
            seen.extend(ids for batch in loader for ids in (batch.tokens, batch.labels))
        assert all(ids.min() >= 0 and ids.max() < 64 for ids in seen)


# Batches


def make_batches(n_rows=10, batch_size=3, *, seq_len=4, ragged=0, **options) -> Batches:
    """Rows of the stream 0, 1, 2, ..., the last one short of `ragged` labels."""
    stream = np.arange(n_rows * seq_len + 1 - ragged)
    return Batches(Blocks(stream, seq_len, 4096, IGNORE), batch_size, **{"n_batches": 40, "seed": 5} | options)


def test_a_micro_batch_depends_on_its_number_alone():
    straight = [make_batches()[m] for m in range(40)]
    reader = make_batches()
    for m in [39, 0, 17, 17, 3, 38, 1]:
        assert torch.equal(reader[m].tokens, straight[m].tokens)
        assert torch.equal(reader[m].labels, straight[m].labels)


def test_an_epoch_holds_every_row_once_even_if_batches_cross_its_end():
    batches = make_batches(n_rows=10, batch_size=3)
    starts = [start for m in range(40) for start in row_starts(batches[m])]
    epochs = [starts[i : i + 10] for i in range(0, 120, 10)]
    assert all(sorted(epoch) == list(range(0, 40, 4)) for epoch in epochs)
    assert all(a != b for a, b in pairwise(epochs))


def test_a_corpus_smaller_than_a_batch_is_repeated():
    assert sorted(row_starts(make_batches(n_rows=2, batch_size=6)[0])) == [0, 0, 0, 4, 4, 4]


def test_the_order_follows_the_seed():
    orders = [[row_starts(make_batches(seed=seed)[m]) for m in range(3)] for seed in (5, 5, 6)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_are_disjoint_and_together_are_one_rank_with_a_bigger_batch(world):
    ranks = [make_batches(n_rows=24, batch_size=2, rank=rank, world=world, accumulate=2) for rank in range(world)]
    single = make_batches(n_rows=24, batch_size=2 * world, accumulate=2)
    for m in range(12):
        parts = [rank[m] for rank in ranks]
        assert torch.equal(torch.cat([part.tokens for part in parts]), single[m].tokens)
        assert torch.equal(torch.cat([part.labels for part in parts]), single[m].labels)
        assert {part.window_tokens for part in parts} == {single[m].window_tokens}
    epoch = [start for m in range(24 // (2 * world)) for rank in ranks for start in row_starts(rank[m])]
    assert len(epoch) == len(set(epoch)) == 24


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_window_tokens_count_the_whole_window_of_all_ranks(world, accumulate):
    options = {"ragged": 3, "n_rows": 7, "batch_size": 2, "accumulate": accumulate, "world": world}
    ranks = [make_batches(**options, rank=rank) for rank in range(world)]
    counts = set()
    for window in range(5):
        members = [rank[m] for rank in ranks for m in range(window * accumulate, (window + 1) * accumulate)]
        counts |= {sum(int((batch.labels != IGNORE).sum()) for batch in members)}
        assert {batch.window_tokens for batch in members} == {sum(int((b.labels != IGNORE).sum()) for b in members)}
    assert len(counts) > 1  # the short row makes windows differ, or this shows nothing


def test_a_resumed_run_reads_on_where_it_stopped():
    options = {"accumulate": 3, "max_steps": 6, "batch_size": 2}
    whole = list(text_data(range(90), **options).train_dataloader())
    resumed = text_data(range(90), step=4, **options).train_dataloader()
    left = list(resumed)
    assert len(whole) == len(resumed) == 18
    assert len(left) == 6
    for batch, right in zip(left, whole[12:], strict=True):
        assert torch.equal(batch.tokens, right.tokens)
        assert torch.equal(batch.labels, right.labels)
        assert batch.window_tokens == right.window_tokens


def test_the_loader_of_a_rank_gives_its_own_share():
    options = {"accumulate": 2, "max_steps": 3}
    loaders = [text_data(range(90), rank=rank, world=2, **options).train_dataloader() for rank in (0, 1)]
    single = text_data(range(90), batch_size=2, **options).train_dataloader()
    for first, second, right in zip(*loaders, single, strict=True):
        assert torch.equal(torch.cat([first.tokens, second.tokens]), right.tokens)
        assert first.window_tokens == second.window_tokens == right.window_tokens


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_validation_covers_the_stream_once_in_order(batch_size):
    module = text_data(range(9), range(100, 131), seq_len=7, batch_size=batch_size)
    for _ in range(2):
        batches = list(module.val_dataloader())
        labels = torch.cat([batch.labels.flatten() for batch in batches])
        assert labels[labels != IGNORE].tolist() == list(range(101, 131))
        assert [batch.window_tokens for batch in batches] == [int((b.labels != IGNORE).sum()) for b in batches]
        assert max(len(batch.tokens) for batch in batches) <= batch_size


def test_validation_stops_after_val_batches():
    module = text_data(range(9), range(100), batch_size=2, val_batches=3)
    assert [row_starts(batch) for batch in module.val_dataloader()] == [[0, 4], [8, 12], [16, 20]]
    assert len(module.val_dataloader()) == 3


# The cache


@pytest.fixture
def text(tmp_path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("".join(f"# {i}\nsome words of document {i}\n" for i in range(12)))
    return file


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def no_preparation(monkeypatch):
    """From here on, reading text and training a tokenizer is an error."""

    def block():
        def refuse(*args):
            raise AssertionError("the text was read again")

        monkeypatch.setattr(TextFiles, "documents", refuse)
        monkeypatch.setattr(HubDataset, "_load", refuse)
        for name in ("train_bpe", "from_hub", "encode"):
            monkeypatch.setattr(data, name, refuse)

    return block


def source_of(file: Path, document_start="#", validation=2) -> TextFiles:
    return TextFiles(str(file), document_start, validation)


def as_lists(corpus: Corpus) -> tuple:
    return corpus.tokenizer.to_str(), corpus.train.tolist(), corpus.validation.tolist()


def test_the_streams_decode_to_the_documents(text, cache):
    corpus = load_corpus(source_of(text), BPE, str(cache))
    for split, stream in (("train", corpus.train), ("validation", corpus.validation)):
        documents = list(source_of(text).documents(split))
        ends = np.flatnonzero(stream == 0)
        assert ends[0] == 0
        assert [corpus.tokenizer.decode(stream[a + 1 : b]) for a, b in pairwise(ends)] == documents
        assert ends[-1] == len(stream) - 1


def test_the_tokenizer_is_trained_on_the_training_split_alone(text, cache):
    corpus = load_corpus(source_of(text), BPE, str(cache))
    train = list(source_of(text).documents("train"))
    assert corpus.tokenizer.to_str() == data.train_bpe(train, BPE["vocab_size"]).to_str()


def test_the_cache_is_made_once(text, cache, no_preparation):
    first = as_lists(load_corpus(source_of(text), BPE, str(cache)))
    no_preparation()
    assert as_lists(load_corpus(source_of(text), BPE, str(cache))) == first


def test_a_moved_cache_loads(text, cache, tmp_path, no_preparation):
    first = as_lists(load_corpus(source_of(text), BPE, str(cache)))
    shutil.move(cache, tmp_path / "else" / "where")
    no_preparation()
    assert as_lists(load_corpus(source_of(text), BPE, str(tmp_path / "else" / "where"))) == first


def test_the_cache_key_follows_the_text_and_what_was_done_to_it(text, cache, tmp_path):
    def folders() -> int:
        return len(list(cache.iterdir()))

    load_corpus(source_of(text), BPE, str(cache))
    copy = shutil.copy(text, tmp_path / "copy.txt")
    load_corpus(source_of(copy), dict(BPE), str(cache))
    assert folders() == 1  # the same text from another path
    for i, (source, tokenizer) in enumerate(
        [
            (source_of(text), BPE | {"vocab_size": 281}),
            (source_of(text, document_start=None, validation=0.2), BPE),
            (source_of(text, document_start="# [0-9]"), BPE),
            (source_of(text, validation=3), BPE),
        ]
    ):
        load_corpus(source, tokenizer, str(cache))
        assert folders() == 2 + i
    text.write_text(text.read_text().replace("words", "Words"))
    load_corpus(source_of(text), BPE, str(cache))
    assert folders() == 6


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_ids_are_stored_in_16_bits_only_where_all_fit(text, cache, monkeypatch, size, dtype):
    tokenizer = words_tokenizer([f"w{i}" for i in range(1, size)])
    monkeypatch.setattr(data, "train_bpe", lambda documents, vocab_size: tokenizer)
    last = f"w{size - 1}"
    text.write_text(f"w1 {last}\nw2 {last}\n")
    corpus = load_corpus(source_of(text, None, 0.5), BPE, str(cache))
    assert corpus.train.dtype == corpus.validation.dtype == dtype
    assert corpus.train.tolist() == [0, 1, size - 1, 0]
    assert corpus.validation.tolist() == [0, 2, size - 1, 0]


def test_a_crash_while_preparing_leaves_nothing(text, cache):
    class Crash(TextFiles):
        def documents(self, split):
            yield from super().documents("train")
            if split == "validation":
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_corpus(Crash(str(text), "#", 2), BPE, str(cache))
    assert list(cache.iterdir()) == []
    assert len(load_corpus(source_of(text), BPE, str(cache)).validation) > 2


@pytest.mark.parametrize("validation", [1, 7, 0.5])
def test_a_text_with_nothing_left_to_train_on_is_refused(tmp_path, cache, validation):
    (tmp_path / "a.txt").write_text("one line\n")
    with pytest.raises(ValueError, match=rf"data\.validation={validation} leaves no document for the train split"):
        load_corpus(TextFiles(str(tmp_path / "a.txt"), None, validation), BPE, cache)


def test_a_split_without_documents_is_refused_and_not_cached(tmp_path, cache):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps({"text": "the only document"}))
    source = HubDataset(str(tmp_path / "set"), None, "main", "text", None, 1, True, None)
    with pytest.raises(ValueError, match=r"data\.validation=1 leaves no document for the train split"):
        load_corpus(source, BPE, cache)
    assert not any(Path(cache).iterdir())


@pytest.mark.parametrize("damage", ["truncated", "missing", "not json"])
def test_a_damaged_cache_is_named(text, cache, damage):
    load_corpus(source_of(text), BPE, cache)
    (folder,) = Path(cache).iterdir()
    if damage == "truncated":
        (folder / "train.bin").write_bytes((folder / "train.bin").read_bytes()[:-2])
    elif damage == "missing":
        (folder / "tokenizer.json").unlink()
    else:
        (folder / "meta.json").write_text("{")
    with pytest.raises(RuntimeError, match=rf"{folder} is damaged .* delete that folder"):
        load_corpus(source_of(text), BPE, cache)


def test_two_preparations_at_once_both_succeed(text, cache):
    both_are_writing = threading.Barrier(2, timeout=10)

    class Slow(TextFiles):
        def documents(self, split):
            if split == "validation":
                both_are_writing.wait()
            return super().documents(split)

    results = []
    threads = [
        threading.Thread(target=lambda: results.append(load_corpus(Slow(str(text), "#", 2), BPE, str(cache))))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 2
    assert as_lists(results[0]) == as_lists(results[1])
    assert len(list(cache.iterdir())) == 1


# Hub sets without network

HUB_SET = ("some-owner/some-set", "some-name", "main", "text", None, 2, False, None)


def test_a_hub_set_that_is_neither_prepared_nor_cached_fails_at_once(cache):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"data\.repo=some-owner/some-set .* nor is it in the cache .*Run once with"):
        load_corpus(HubDataset(*HUB_SET), BPE, str(cache))
    assert time.monotonic() - start < 10
    assert list(cache.iterdir()) == []


def test_a_prepared_hub_set_loads_with_the_network_blocked(cache, monkeypatch, no_preparation):
    rows = [{"text": f"row {i}\n"} for i in range(6)]
    monkeypatch.setattr(HubDataset, "_load", lambda self, split: rows)
    first = as_lists(load_corpus(HubDataset(*HUB_SET), BPE, str(cache)))
    no_preparation()

    def refuse(*args, **options):
        raise AssertionError("the network was used")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert as_lists(load_corpus(HubDataset(*HUB_SET), BPE, str(cache))) == first


def test_a_cached_corpus_says_how_its_ids_are_stored(text, cache):
    load_corpus(source_of(text), BPE, str(cache))
    (folder,) = cache.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == [
        "meta.json",
        "tokenizer.json",
        "train.bin",
        "validation.bin",
    ]
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["dtype"] == "uint16"
    assert {split: meta[split] for split in ("train", "validation")} == {
        split: (folder / f"{split}.bin").stat().st_size // 2 for split in ("train", "validation")
    }
