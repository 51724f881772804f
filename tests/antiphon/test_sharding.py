"""Shards reassemble to the text, hold at most the tokens asked for, and are cut where a reader would pause."""

from __future__ import annotations

import time
from functools import cache
from itertools import pairwise

import pytest
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from antiphon.engine.errors import InputError
from antiphon.sharding import cut_text

TRAINING = [
    "The driver calls a question, and a choir of workers answers.\n\nEach holds one shard of the document.",
    "def cut(text):\n    return [line for line in text]\n\n\nclass Shard:\n    pass\n",
    "Ein Wort, noch ein Wort?! Then another; (and) more...\n\n  Indented: 12345.",
]


class ByteLevelTokenizer:
    """A real byte-level BPE, small enough that most characters outside of ASCII take several tokens."""

    def __init__(self) -> None:
        self.backend = tokenizers.Tokenizer(models.BPE())
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.post_processor = processors.ByteLevel(trim_offsets=False)
        self.backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        self.backend.train_from_iterator(
            TRAINING * 3, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        )
        self.longest_input = 0

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        self.longest_input = max(self.longest_input, len(text))
        encoding = self.backend.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def count(self, text: str) -> int:
        return len(self.encode_with_offsets(text)[0])


@cache
def tokenizer() -> ByteLevelTokenizer:
    return ByteLevelTokenizer()


def cut(text: str, shard_tokens: int, shard_overlap: int = 0) -> list[tuple[int, int]]:
    return list(cut_text(text, tokenizer(), shard_tokens, shard_overlap))


def uncovered(text: str, spans: list[tuple[int, int]]) -> str:
    """The characters of `text` in no span."""
    left, position = "", 0
    for start, end in spans:
        left += text[position:start]
        position = max(position, end)
    return left + text[position:]


CHARACTERS = st.sampled_from(
    [*"abc .,?!\n\t(1é中。文", "\u0301", "😀", "👩\u200d👩", "🏽", "\n\n", "The driver ", "\u2003", "ß"]
)
TEXTS = st.lists(CHARACTERS, max_size=120).map("".join) | st.text(st.characters(exclude_categories=["Cs"]), max_size=80)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS, st.integers(8, 40))
@example("", 8)
@example("x", 8)
@example("\n\n x \n", 8)
@example("😀" * 9, 8)
def test_shards_without_overlap_cover_all_but_white_space_in_order_and_within_size(text: str, size: int) -> None:
    spans = cut(text, size)
    assert not uncovered(text, spans).strip()
    assert all(first[1] <= second[0] for first, second in pairwise(spans))
    assert all(text[start:end].strip() and tokenizer().count(text[start:end]) <= size for start, end in spans)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS, st.integers(12, 40), st.data())
def test_overlap_is_at_most_what_was_asked_and_every_shard_brings_new_text(
    text: str, size: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(1, (size - 1) // 2))
    spans = cut(text, size, overlap)
    assert not uncovered(text, spans).strip()
    for (start, end), (next_start, next_end) in pairwise(spans):
        assert start < next_start and end < next_end
        assert tokenizer().count(text[next_start:next_end]) <= size
        begins = [start + offset[0] for offset in tokenizer().encode_with_offsets(text[start:end])[1]]
        assert sum(begin >= next_start for begin in begins) <= overlap


def test_overlap_repeats_the_end_of_the_shard_before() -> None:
    text = "The driver calls a question and a choir of workers answers " * 20
    spans = cut(text, 32, 8)
    shared = [first[1] - second[0] for first, second in pairwise(spans)]
    assert len(spans) > 3 and min(shared) > 0
    assert all(first[1] <= second[0] for first, second in pairwise(cut(text, 32)))


@pytest.mark.parametrize("size", [4, 7, 8, 9, 63, 64, 65])
def test_no_cut_inside_a_character_of_several_tokens(size: int) -> None:
    text = "😀中" * 100
    assert tokenizer().count("😀") > 1
    spans = cut(text, size)
    assert "".join(text[start:end] for start, end in spans) == text
    assert all(tokenizer().count(text[start:end]) <= size for start, end in spans)


def test_cutting_by_tokens_alone_would_split_such_characters() -> None:
    """Negative control of the test above: the first tokens of its text, as many as a shard holds, end inside one."""
    ids = tokenizer().encode_with_offsets("😀中" * 100)[0]
    assert all("\ufffd" in tokenizer().backend.decode(ids[:size]) for size in (8, 9, 64, 65))


@pytest.mark.parametrize("unit", ["e\u0301\u0316", "👩🏽\u200d🚀", "x\ufe0f"])
def test_marks_and_joined_emoji_stay_with_what_they_belong_to(unit: str) -> None:
    text = unit * 60
    size = 3 * tokenizer().count(unit) + 4
    spans = cut(text, size)
    assert len(spans) > 10 and uncovered(text, spans) == ""
    assert all(start % len(unit) == 0 for start, _ in spans)


@pytest.mark.parametrize(
    ("separator", "boundary"),
    [("\n\n", "\n\n"), ("\n", "\n"), (" ", ". "), (" ", "? "), (" ", ".) ")],
)
def test_cut_prefers_the_strongest_pause_in_the_last_quarter(separator: str, boundary: str) -> None:
    """With each pause placed at 85 % of the shard and weaker ones after it, the cut is at that pause."""
    words = "the driver calls a choir of workers "
    head = (words * 40)[: 85 * 3].rstrip()
    mark = boundary.strip() if boundary.strip() else ""
    weaker = {"\n\n": "a\nb. c ", "\n": "a. b ", " ": "ab c "}[separator]
    text = head + mark + separator + weaker * 80
    size = int(tokenizer().count(head) / 0.85)
    start, end = cut(text, size)[0]
    assert text[start:end] == head + mark


def test_a_pause_before_the_last_quarter_does_not_shorten_a_shard() -> None:
    text = "one two\n\n" + "the driver calls " * 60
    start, end = cut(text, 64)[0]
    assert tokenizer().count(text[start:end]) > 48


def test_the_indentation_of_a_shards_first_line_stays() -> None:
    body = "    return the driver and the workers of the document\n"
    text = "def answer():\n" + body * 40
    spans = cut(text, 40)
    assert len(spans) > 5
    assert all(text[start:end].startswith("    return") for start, end in spans[1:])


def test_a_text_of_white_space_alone_has_no_shards_and_long_runs_fill_none() -> None:
    assert cut(" \n\t\u2003\n", 8) == []
    text = "a" + " " * 5000 + "b" + "\n" * 5000 + "c"
    assert [text[start:end] for start, end in cut(text, 8)] == ["a", "b", "c"]


@pytest.mark.parametrize(("num_spaces", "start"), [(0, 0), (256, 0), (257, 257)])
def test_white_space_without_end_is_no_indentation(num_spaces: int, start: int) -> None:
    assert cut(" " * num_spaces + "b", 4096) == [(start, num_spaces + 1)]


def test_a_file_of_one_token_is_one_shard_of_any_size() -> None:
    assert cut("a", 1) == [(0, 1)] and cut("a", 4096, 64) == [(0, 1)]


def test_special_token_strings_are_cut_like_any_text() -> None:
    text = "<|im_end|>" * 50
    spans = cut(text, 16)
    assert "".join(text[start:end] for start, end in spans) == text


class MarkingTokenizer(ByteLevelTokenizer):
    """As tokenizers that put marks before every text: each input has more tokens on its own than amid a text."""

    def __init__(self, num_marks: int) -> None:
        super().__init__()
        self.num_marks = num_marks

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        ids, offsets = super().encode_with_offsets(text)
        return [0] * self.num_marks + ids, [(0, 0)] * self.num_marks + offsets


@pytest.mark.parametrize("num_marks", [1, 2, 20, 28])
@pytest.mark.parametrize("overlap", [0, 3, 15])
def test_a_shard_that_has_more_tokens_alone_than_amid_the_text_is_cut_again(num_marks: int, overlap: int) -> None:
    marking = MarkingTokenizer(num_marks)
    text = "the driver calls a choir. " * 60
    spans = list(cut_text(text, marking, 32, overlap))
    assert max(marking.count(text[start:end]) for start, end in spans) <= 32
    assert not uncovered(text, spans).strip()
    assert all(first[0] < second[0] and first[1] < second[1] for first, second in pairwise(spans))


@pytest.mark.parametrize(("size", "overlap"), [(0, 0), (-1, 0), (8, 4), (8, -1), (9, 5), (1, 1)])
def test_impossible_sizes_are_refused(size: int, overlap: int) -> None:
    with pytest.raises(InputError, match="--shard"):
        cut("text", size, overlap)


def test_the_largest_overlap_allowed_still_ends() -> None:
    assert len(cut("the driver calls " * 50, 9, 4)) > 10


def test_a_character_larger_than_a_shard_is_an_error_that_names_the_option() -> None:
    with pytest.raises(InputError, match=r"'😀'.*--shard-tokens"):
        cut("😀", 1)


@pytest.mark.parametrize("unit", ["word ", "a", "é", "1"])
def test_a_single_line_of_megabytes_is_cut_in_slices_and_in_linear_time(unit: str) -> None:
    """Four times the text must take about four times as long: 16 times would be quadratic."""
    fresh = ByteLevelTokenizer()
    seconds = []
    for num_characters in (60_000, 240_000):
        text = unit * (num_characters // len(unit))
        before = time.process_time()
        spans = list(cut_text(text, fresh, 1024))
        seconds.append(time.process_time() - before)
        assert not uncovered(text, spans).strip()
    assert fresh.longest_input <= 20_000
    assert seconds[1] < 9 * seconds[0]
