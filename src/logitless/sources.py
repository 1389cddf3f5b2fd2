"""Where documents come from: files on this machine, or a data set of the Hugging Face hub.

A source has a fingerprint, which names its text exactly enough to key a cache of tokens, and yields the documents of
its two splits, "train" and "validation".
"""

import gzip
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Protocol

from logitless.hub import use_hub_cache_when_offline


class Source(Protocol):
    validation: int | float | str

    def fingerprint(self) -> str: ...

    def documents(self, split: str) -> Iterator[str]: ...


class TextFiles:
    """Plain-text files, `.txt` or `.txt.gz`; a file is one document unless `document_start` cuts it.

    Args:
        path: a file, or a folder whose text files are taken in the order of their names.
        document_start: regular expression of the line that opens a document, or None.
        validation: documents to hold out at the end (an integer), or the part of the characters (a float below 1).

    Its methods raise ValueError where there is no text at `path`.
    """

    def __init__(self, path: str, document_start: str | None, validation: int | float):
        self.path = Path(path).expanduser()
        self.document_start = document_start
        self.validation = validation

    def files(self) -> list[Path]:
        folder = sorted(
            file for file in self.path.rglob("*") if file.is_file() and file.name.endswith((".txt", ".txt.gz"))
        )
        files = [self.path] if self.path.is_file() else folder
        if not files:
            raise ValueError(f"data.path={self.path}: no such file, or a folder without .txt and .txt.gz files")
        return files

    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps([self.document_start, self.validation]).encode())
        for file in self.files():
            digest.update(hashlib.sha256(_read(file).encode()).digest())
        return digest.hexdigest()

    def documents(self, split: str) -> Iterator[str]:
        texts = (_read(file).splitlines(keepends=True) for file in self.files())
        documents = [document for lines in texts for document in split_documents(lines, self.document_start)]
        train, validation = _hold_out(documents, self.validation)
        yield from {"train": train, "validation": validation}[split]


def embedded_text(name: str, document_start: str | None, validation: int | float) -> TextFiles:
    """A text that comes with this repository, by its name in src/logitless/assets/."""
    return TextFiles(str(Path(__file__).parent / "assets" / name), document_start, validation)


@dataclass(frozen=True)
class HubDataset:
    """A data set of the Hugging Face hub, or a local folder in its format, through `datasets`.

    Args:
        repo: repository on the hub, or a local folder.
        name: configuration of the data set, or None.
        revision: commit, tag or branch.
        text_column: the column that holds the text.
        document_start: regular expression of the row that opens a document, or None where every row is a document.
        validation: the split to validate on, or a number of documents to hold out at the start of the train split.
        streaming: whether rows are read over the network as they are needed, without a download.
        max_documents: how many documents to train on, or None for all.
    """

    repo: str
    name: str | None
    revision: str
    text_column: str
    document_start: str | None
    validation: str | int
    streaming: bool
    max_documents: int | None

    def fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps(asdict(self)).encode())
        for file in sorted(file for file in Path(self.repo).rglob("*") if file.is_file()):  # none in a name of the hub
            with open(file, "rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        return digest.hexdigest()

    def documents(self, split: str) -> Iterator[str]:
        held_out = self.validation if isinstance(self.validation, int) else 0
        if split == "validation" and held_out:
            return islice(self._all_documents("train"), held_out)
        if split == "validation":
            return self._all_documents(self.validation)
        stop = None if self.max_documents is None else held_out + self.max_documents
        return islice(self._all_documents("train"), held_out, stop)

    def _all_documents(self, hub_split: str) -> Iterator[str]:
        rows = (row[self.text_column] for row in self._load(hub_split))
        return rows if self.document_start is None else split_documents(rows, self.document_start)

    def _load(self, hub_split: str):
        is_local = Path(self.repo).exists()
        if not is_local:
            use_hub_cache_when_offline()
        import datasets  # 0.9 s and 290 MB that runs on local text do without

        revision = None if is_local else self.revision
        try:
            return datasets.load_dataset(
                self.repo, self.name, split=hub_split, revision=revision, streaming=self.streaming
            )
        except (ConnectionError, FileNotFoundError, ValueError) as error:
            raise RuntimeError(
                f"data.repo={self.repo} (revision {self.revision}) could not be loaded, nor is it in the cache "
                f"{datasets.config.HF_CACHE_HOME}: {error}. Run once with network, or use data=austen"
            ) from error


def split_documents(lines: Iterator[str] | list[str], document_start: str | None) -> Iterator[str]:
    """Joins lines into documents; a line that matches `document_start` opens one. Blank documents are dropped."""
    opens = re.compile(document_start).match if document_start else lambda line: False
    document = []
    for line in chain(lines, [None]):
        if line is None or opens(line):
            if text := "".join(document).strip():
                yield text + "\n"
            document = []
        document.append(line)


def _hold_out(documents: list[str], validation: int | float) -> tuple[list[str], list[str]]:
    """The documents to train on and those at the end to validate on; a float may cut a document at a line's end."""
    if isinstance(validation, int):
        return documents[:-validation], documents[-validation:]
    rest = round((1 - validation) * sum(map(len, documents)))
    for i, document in enumerate(documents):
        if rest < len(document):
            cut = document.rfind("\n", 0, rest) + 1
            parts = [[*documents[:i], document[:cut]], [document[cut:], *documents[i + 1 :]]]
            train, held_out = ([d for d in part if d] for part in parts)
            return train, held_out
        rest -= len(document)
    return documents, []


def _read(file: Path) -> str:
    opened = gzip.open if file.suffix == ".gz" else open
    try:
        with opened(file, "rt", encoding="utf-8-sig") as stream:  # a byte order mark is no text
            return stream.read()
    except (OSError, EOFError, UnicodeError) as error:
        raise ValueError(f"data.path: {file} cannot be read as UTF-8 text: {error}") from error
