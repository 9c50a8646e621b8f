"""Characters of real text: vocabulary, splits and windows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elche.demo.text import CharDataset, encode, load_corpus
from elche.errors import ConfigError

SYMBOLS = {int(encode(one)): one for one in map(chr, [10, *range(32, 127)])}


def decode(symbols: list[int]) -> str:
    return "".join(SYMBOLS.get(symbol, "\ufffd") for symbol in symbols)


printable = st.text(
    st.characters(min_codepoint=32, max_codepoint=126) | st.just("\n"), max_size=50
)


@given(printable)
def test_the_vocabulary_is_lossless(text: str) -> None:
    assert decode(encode(text).tolist()) == text


def test_the_standard_library_is_found_and_split() -> None:
    corpus = load_corpus(max_chars=300_000)
    total = corpus.train.numel() + corpus.held_out.numel()
    assert 299_000 < total < 302_000
    assert corpus.held_out.numel() > 1000
    assert "standard library" in corpus.source
    assert torch.equal(corpus.train, load_corpus(max_chars=300_000).train)


def test_a_file_holds_out_its_last_tenth(tmp_path: Path) -> None:
    path = tmp_path / "poem.txt"
    path.write_text("ab\r\n" * 100, encoding="utf-8", newline="")
    corpus = load_corpus(path)
    assert decode(corpus.train.tolist()) == "ab\n" * 90
    assert decode(corpus.held_out.tolist()) == "ab\n" * 10
    assert corpus.source == str(path)


def test_a_directory_holds_out_whole_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for index in range(20):
        (tmp_path / "deep" / f"{index}.txt").write_text(chr(65 + index) * 10)
    (tmp_path / "picture.png").write_bytes(b"\0\1\2")
    (tmp_path / ".hidden").write_text("hidden")
    corpus = load_corpus(tmp_path)
    train, held_out = (
        {*decode(part.tolist())} - {"\n"} for part in (corpus.train, corpus.held_out)
    )
    assert len(held_out) == 2
    assert train | held_out == {chr(65 + index) for index in range(20)}
    assert not train & held_out


def test_texts_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the text .*absent"):
        load_corpus(tmp_path / "absent")
    with pytest.raises(ConfigError, match="found 0 text files in"):
        load_corpus(tmp_path)
    (tmp_path / "blank").write_text(" \n")
    with pytest.raises(ConfigError, match=r"the text .*blank is empty"):
        load_corpus(tmp_path / "blank")


@given(length=st.integers(10, 200), context=st.integers(1, 8), num=st.integers(1, 100))
def test_windows_are_inside_and_one_apart(length: int, context: int, num: int) -> None:
    if num > length - context:
        with pytest.raises(ConfigError, match="do not fit into a text of"):
            CharDataset(torch.arange(length), context, num)
        return
    dataset = CharDataset(torch.arange(length), context, num)
    items = [dataset[i] for i in range(len(dataset))]
    for x, y in items:
        assert torch.equal(x + 1, y)
        assert len(x) == len(y) == context
    begins = [int(x[0]) for x, _ in items]
    assert begins == sorted(set(begins))


def test_windows_are_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match="0 windows of 4 characters do not fit"):
        CharDataset(torch.arange(10), 4, 0)
    with pytest.raises(IndexError, match="sample 3 of 3"):
        CharDataset(torch.arange(10), 4, 3)[3]
