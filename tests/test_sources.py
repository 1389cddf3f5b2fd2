import gzip
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
from omegaconf import OmegaConf

from logitless import sources
from logitless.sources import HubDataset, TextFiles, embedded_text, split_documents

ROOT = Path(__file__).parents[1]
NOVELS = ["SENSE AND SENSIBILITY", "PRIDE AND PREJUDICE", "MANSFIELD PARK", "EMMA", "NORTHANGER ABBEY"]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "wt", encoding="utf-8") as stream:
        stream.write(text)
    return path


def both_splits(source) -> tuple[list[str], list[str]]:
    return list(source.documents("train")), list(source.documents("validation"))


# Text files


def test_a_file_is_one_document_and_a_float_cuts_it_at_a_line_end(tmp_path):
    lines = [f"line {i} {'x' * (i % 7)}\n" for i in range(100)]
    file = write(tmp_path / "a.txt", "".join(lines))
    (train,), (validation,) = both_splits(TextFiles(str(file), None, 0.1))
    assert train + validation == "".join(lines)
    assert train.endswith("\n")
    assert validation.startswith("line ")
    assert abs(len(validation) / len(train + validation) - 0.1) < 0.02


def test_folder_order_is_that_of_names_through_gz_and_subfolders(tmp_path):
    for name in ["c.txt", "a.txt.gz", "b.txt", "d/e.txt", "ignored.md"]:
        write(tmp_path / name, f"text of {name}\n")
    train, validation = both_splits(TextFiles(str(tmp_path), None, 1))
    assert train == ["text of a.txt.gz\n", "text of b.txt\n", "text of c.txt\n"]
    assert validation == ["text of d/e.txt\n"]


def test_a_packed_file_gives_the_text_and_the_fingerprint_of_a_plain_one(tmp_path):
    plain = TextFiles(str(write(tmp_path / "a.txt", "one\ntwo\n")), None, 0.5)
    packed = TextFiles(str(write(tmp_path / "other.txt.gz", "one\ntwo\n")), None, 0.5)
    assert both_splits(plain) == both_splits(packed) == (["one\n"], ["two\n"])
    assert plain.fingerprint() == packed.fingerprint()


def test_document_start_cuts_files_into_documents(tmp_path):
    file = write(tmp_path / "a.txt", "preface\n# one\nA\n\n# two\nB\n   \n\n# three\nC")
    train, validation = both_splits(TextFiles(str(file), r"# ", 1))
    assert train == ["preface\n", "# one\nA\n", "# two\nB\n"]
    assert validation == ["# three\nC\n"]


def test_blank_documents_are_dropped():
    assert list(split_documents(["#\n", "a\n", "\n", "#\n", "b\n", " \n"], "#")) == ["#\na\n", "#\nb\n"]
    assert list(split_documents(["\n", "  \n", "#a\n"], "#")) == ["#a\n"]
    assert list(split_documents([], None)) == []


def test_validation_as_an_integer_holds_out_the_last_documents(tmp_path):
    file = write(tmp_path / "a.txt", "".join(f"#{i}\n" for i in range(5)))
    train, validation = both_splits(TextFiles(str(file), "#", 2))
    assert (train, validation) == (["#0\n", "#1\n", "#2\n"], ["#3\n", "#4\n"])


@pytest.mark.parametrize("part", [0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9])
def test_a_float_loses_nothing_between_the_splits_and_cuts_whole_lines(tmp_path, part):
    documents = [f"#{i}\n" + "".join(f"{i}.{j}\n" for j in range(3 * i + 1)) for i in range(8)]
    file = write(tmp_path / "a.txt", "".join(documents))
    train, validation = both_splits(TextFiles(str(file), "#", part))
    assert "".join(train + validation) == "".join(documents)
    assert all(document.endswith("\n") for document in train + validation)
    characters = len("".join(documents))
    assert 0 <= len("".join(validation)) - part * characters < 6  # the rest of one line


def test_a_missing_path_is_refused_by_its_key(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (tmp_path / "nothing.txt", empty):
        source = TextFiles(str(path), None, 0.1)
        with pytest.raises(ValueError, match=rf"data\.path={path}"):
            list(source.documents("train"))
        with pytest.raises(ValueError, match=r"data\.path="):
            source.fingerprint()


def test_fingerprints_follow_the_text_and_the_settings_and_not_the_path(tmp_path):
    a = write(tmp_path / "a.txt", "one\ntwo\n")
    b = write(tmp_path / "b.txt", "one\ntwo\n")
    c = write(tmp_path / "c.txt", "one\nTwo\n")
    prints = [TextFiles(str(path), None, 0.5).fingerprint() for path in (a, b, c)]
    prints += [TextFiles(str(a), "#", 0.5).fingerprint(), TextFiles(str(a), None, 0.4).fingerprint()]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 4


def test_the_embedded_text_is_five_novels_to_train_and_persuasion_to_validate():
    settings = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/data/austen.yaml"))
    assert settings.pop("_target_") == "logitless.sources.embedded_text"
    train, validation = both_splits(embedded_text(**settings))
    assert [document.splitlines()[0] for document in train] == NOVELS
    assert [document.splitlines()[0] for document in validation] == ["Persuasion"]
    assert min(map(len, train + validation)) > 400_000


def test_the_embedded_text_is_the_one_its_readme_describes():
    assets = ROOT / "src/logitless/assets"
    text = gzip.decompress((assets / "austen.txt.gz").read_bytes())
    readme = (assets / "README.md").read_text()
    assert f"`{hashlib.sha256(text).hexdigest()}`" in readme
    assert f"{len(text):,} bytes" in readme


# Data sets of the hub, read by `datasets` from a local folder


@pytest.fixture(autouse=True)
def scratch_cache(tmp_path, monkeypatch):
    """Whatever `datasets` unpacks goes away with the test."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "datasets_cache"))
    datasets.disable_progress_bars()


ROWS = [f"document {i}\nits second line\n" for i in range(10)]


@pytest.fixture(params=["jsonl", "parquet"])
def folder(request, tmp_path):
    """A data set of ten training and three validation rows, with a column that is none of our business."""
    place = tmp_path / "set"
    place.mkdir()
    for split, rows in {"train": ROWS, "validation": ["v0\n", "v1\n", "v2\n"]}.items():
        table = datasets.Dataset.from_dict({"id": list(range(len(rows))), "words": rows})
        if request.param == "jsonl":
            table.to_json(place / f"{split}.jsonl")
        else:
            table.to_parquet(place / f"{split}.parquet")
    return place


def hub(repo, **options) -> HubDataset:
    defaults = {"name": None, "revision": "main", "text_column": "words", "document_start": None}
    defaults |= {"validation": "validation", "streaming": False, "max_documents": None}
    return HubDataset(str(repo), **defaults | options)


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_are_documents_and_the_named_split_validates(folder, streaming):
    assert both_splits(hub(folder, streaming=streaming)) == (ROWS, ["v0\n", "v1\n", "v2\n"])


@pytest.mark.parametrize("streaming", [False, True])
def test_an_integer_holds_out_the_first_documents_of_train(folder, streaming):
    assert both_splits(hub(folder, validation=3, streaming=streaming)) == (ROWS[3:], ROWS[:3])


def test_max_documents_counts_what_is_trained_on(folder):
    assert both_splits(hub(folder, max_documents=4)) == (ROWS[:4], ["v0\n", "v1\n", "v2\n"])
    assert both_splits(hub(folder, max_documents=4, validation=3)) == (ROWS[3:7], ROWS[:3])
    assert both_splits(hub(folder, max_documents=400, validation=3)) == (ROWS[3:], ROWS[:3])


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_wikitext_are_joined_into_articles(tmp_path, streaming):
    rows = [
        "",
        " = Robin = \n",
        "",
        " A bird . \n",
        " = = Song = = \n",
        " Loud = clear . \n",
        "",
        " = Top = Hat = \n",
        "",
        " x \n",
    ]
    settings = OmegaConf.to_container(OmegaConf.load(ROOT / "conf/data/wikitext103.yaml"))
    settings |= {"repo": str(tmp_path / "wiki"), "name": None, "streaming": streaming}
    assert settings.pop("_target_") == "logitless.sources.HubDataset"
    for split in ("train", "validation"):
        write(tmp_path / "wiki" / f"{split}.jsonl", "".join(json.dumps({"text": row}) + "\n" for row in rows))
    articles = ["= Robin = \n A bird . \n = = Song = = \n Loud = clear .\n", "= Top = Hat = \n x\n"]
    assert both_splits(HubDataset(**settings)) == (articles, articles)


def test_every_hub_configuration_names_the_arguments_of_its_source():
    files = [file for file in (ROOT / "conf/data").glob("*.yaml") if "HubDataset" in file.read_text()]
    assert len(files) >= 3
    for file in files:
        settings = OmegaConf.to_container(OmegaConf.load(file))
        settings.pop("_target_")
        assert HubDataset(**settings).repo == settings["repo"]


def test_the_fingerprint_of_a_local_data_set_follows_its_text_and_every_setting(folder):
    before = hub(folder).fingerprint()
    assert hub(folder).fingerprint() == before
    others = [
        {"max_documents": 3},
        {"validation": 2},
        {"text_column": "id"},
        {"document_start": "x"},
        {"revision": "b"},
    ]
    assert len({before, *(hub(folder, **other).fingerprint() for other in others)}) == 1 + len(others)
    write(folder / "train.jsonl", '{"id": 0, "words": "changed"}\n')
    assert hub(folder).fingerprint() != before


def test_a_hub_fingerprint_needs_no_network(monkeypatch):
    monkeypatch.setattr(HubDataset, "_load", None)
    monkeypatch.setattr(sources, "use_hub_cache_when_offline", None)
    assert hub("some-owner/some-set").fingerprint() != hub("some-owner/some-set", revision="v2").fingerprint()


# Without network


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_set_that_is_not_cached_fails_at_once_when_offline(streaming):
    start = time.monotonic()
    with pytest.raises(
        RuntimeError, match=r"data\.repo=some-owner/some-set .*Run once with network, or use data=austen"
    ):
        hub("some-owner/some-set", streaming=streaming).documents("train")
    assert time.monotonic() - start < 10


UNPLUGGED = """
import socket, sys
def refuse(*args, **options): raise socket.gaierror("unplugged")
socket.getaddrinfo = socket.create_connection = socket.socket.connect = refuse
if sys.argv[1] == "datasets first": import datasets
from logitless.sources import HubDataset
options = {"streaming": sys.argv[1] == "streaming", "max_documents": None}
HubDataset("some-owner/some-set", None, "main", "text", None, "validation", **options).documents("train")
"""


@pytest.mark.parametrize("case", ["download", "streaming", "datasets first"])
def test_a_dead_network_is_noticed_without_retries(tmp_path, case):
    hidden = ("HF_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    env = {key: value for key, value in os.environ.items() if not key.upper().startswith(hidden)}
    env |= {"HF_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "src")))}
    run = subprocess.run([sys.executable, "-c", UNPLUGGED, case], env=env, capture_output=True, text=True, timeout=15)
    assert "RuntimeError: data.repo=some-owner/some-set" in run.stderr
    assert str(tmp_path) in run.stderr
    assert "etrying" not in run.stderr
