import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from logitless import tokenizer as module
from logitless.tokenizer import END_OF_TEXT, from_hub, train_bpe

ROOT = Path(__file__).parents[1]
TEXT = ["It was a truth universally acknowledged, that a truth was a truth.\n", "She was, it was, they were.\n"] * 5
ODD = [
    "",
    " ",
    "\n",
    "a\n\n\n  b\n",
    "\ttab\t\ttabs\t",
    "  leading and trailing  ",
    "naïve café — “quotes” …",
    "日本語のテキスト と 한국어",
    "👩‍👩‍👧 🏳️‍🌈 e\u0301 \u00e9",
    "\u200b\ufeff\u00a0\u2028",
    "\x00\x01\x7f control",
    "\r\n windows \r",
    "عربى עברית",
    "x" * 1000,
]


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXT, 290)


def test_training_is_deterministic(bpe):
    assert train_bpe(iter(TEXT), 290).to_str() == bpe.to_str()


@pytest.mark.parametrize("text", ODD)
def test_the_round_trip_is_exact(bpe, text):
    assert bpe.decode(bpe.encode(text, add_special_tokens=False).ids) == text


def test_end_of_text_is_id_0_and_one_token(bpe):
    assert bpe.token_to_id(END_OF_TEXT) == 0
    assert bpe.encode(f"a{END_OF_TEXT}b").ids.count(0) == 1
    assert 0 not in bpe.encode("plain text").ids


def test_ids_lie_below_the_asked_vocabulary_size(bpe):
    assert bpe.get_vocab_size() == 290
    assert sorted(bpe.get_vocab().values()) == list(range(290))
    assert train_bpe(["tiny"], 8192).get_vocab_size() < 300


def test_merges_shorten_the_text_they_were_trained_on(bpe):
    assert len(bpe.encode(TEXT[0]).ids) < len(TEXT[0]) / 2


def test_training_reads_the_first_characters_only(monkeypatch):
    monkeypatch.setattr(module, "TRAINING_CHARACTERS", 40)
    documents = ["aaaa bbbb aaaa bbbb ", "cccc dddd cccc dddd and this is too much", "never read " * 50]
    cut = ["aaaa bbbb aaaa bbbb ", "cccc dddd cccc dddd "]
    assert train_bpe(documents, 300).to_str() == train_bpe(cut, 300).to_str()
    monkeypatch.undo()
    assert train_bpe(documents, 300).to_str() != train_bpe(cut, 300).to_str()


# From the hub


@pytest.fixture
def hub_cache(tmp_path, monkeypatch):
    """A function that puts a tokenizer into an otherwise empty hub cache, as a download would."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))

    def put(repo, tokenizer):
        place = tmp_path / f"models--{repo.replace('/', '--')}"
        commit = "0" * 40
        (place / "refs").mkdir(parents=True)
        (place / "refs/main").write_text(commit)
        (place / "snapshots" / commit).mkdir(parents=True)
        tokenizer.save(str(place / "snapshots" / commit / "tokenizer.json"))

    return put


def test_a_cached_hub_tokenizer_loads_offline(hub_cache, bpe):
    hub_cache("some-owner/some-model", bpe)
    assert from_hub("some-owner/some-model", "main").to_str() == bpe.to_str()


def test_a_tokenizer_without_end_of_text_is_refused(hub_cache, bpe):
    renamed = type(bpe).from_str(bpe.to_str().replace(END_OF_TEXT, "<|other|>"))
    hub_cache("some-owner/some-model", renamed)
    with pytest.raises(ValueError, match=r"tokenizer\.repo=some-owner/some-model has no <\|endoftext\|> token"):
        from_hub("some-owner/some-model", "main")


def test_a_tokenizer_that_is_not_cached_fails_at_once_when_offline(hub_cache):
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=r"tokenizer\.repo=some-owner/some-model .*use tokenizer=bpe8k"):
        from_hub("some-owner/some-model", "main")
    assert time.monotonic() - start < 10


UNPLUGGED = """
import socket
def refuse(*args, **options): raise socket.gaierror("unplugged")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
from logitless.tokenizer import from_hub
from_hub("some-owner/some-model", "main")
"""


def test_a_dead_network_is_noticed_without_retries(tmp_path):
    hidden = ("HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    env = {key: value for key, value in os.environ.items() if not key.upper().startswith(hidden)}
    env |= {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
    run = subprocess.run([sys.executable, "-c", UNPLUGGED], env=env, capture_output=True, text=True, timeout=15)
    assert "RuntimeError: tokenizer.repo=some-owner/some-model" in run.stderr
    assert "etrying" not in run.stderr
