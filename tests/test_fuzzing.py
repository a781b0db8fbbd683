"""The fuzzer itself: its mutations are many and come again, and it sees what it is to see."""

from __future__ import annotations

import itertools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.fuzzing import Excess, mutated, mutated_json, watched

DOCUMENT = json.dumps({"a": [1, {"b": "x", "c": [3]}], "d": {"dict": {"e": 1.5}}}).encode()


@pytest.mark.parametrize("mutate", [mutated, mutated_json])
def test_mutations_are_many_and_those_of_a_seed_are_the_same(mutate: Callable) -> None:
    first = [mutate(DOCUMENT, random.Random(seed)) for seed in range(200)]
    assert first == [mutate(DOCUMENT, random.Random(seed)) for seed in range(200)]
    assert len(set(first)) > 120
    if mutate is mutated_json:  # names that are there twice, depths and numbers of any size
        assert any(text.count(b'"dict":') == 2 for text in first)
        assert any(len(text) > 100_000 for text in first)


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda _: torch.empty(10**9), "tensors of 4,000,000,000 bytes"),
        (lambda _: torch.zeros(10**15), "allocate memory"),
        (lambda _: [0] * 10**7, "Python's objects took"),
        (lambda path: (path / "x").write_text(""), "x' is opened for writing"),
        (lambda path: os.open(path / "x", os.O_RDWR), "x' is opened for writing"),
        (lambda path: os.rename(path / "x", path / "y"), "os.rename"),
        (lambda _: os.system("true"), "os.system"),
        (lambda _: time.sleep(5), "it hangs"),
        (lambda _: sum(1 for _ in itertools.count()), "it hangs"),
    ],
)
def test_what_reading_may_not_do_is_seen(tmp_path: Path, act: Callable, words: str) -> None:
    with pytest.raises(Excess, match=words), watched(100, seconds=0.15):
        act(tmp_path)
    with watched(100):  # and what it may
        torch.zeros(10_000)
        Path(__file__).read_bytes()


def test_one_folder_may_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with watched(100, writes_in=tmp_path / "own"):
        (tmp_path / "own" / "x").write_text("")
        (tmp_path / "own" / "x").rename(tmp_path / "own" / "y")
    with (
        pytest.raises(Excess, match="opened for writing"),
        watched(100, writes_in=tmp_path / "own"),
    ):
        (tmp_path / "own" / ".." / "x").write_text("")
