"""How right a reply is, after SQuAD's normalisation: Sub_EM as the papers have it and strict, exact match, F1."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Score:
    """All metrics of one reply, each between 0 and 1, best over the gold answers."""

    sub_em_paper: float
    sub_em_strict: float
    exact_match: float
    f1: float


def normalise(text: str) -> str:
    """SQuAD's normalisation (v1.1 evaluate script): lower case, no ASCII punctuation, no articles, single spaces."""
    without_punctuation = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", without_punctuation).split())


def sub_em_paper(prediction: str, answers: Sequence[str]) -> float:
    """Sub_EM as the papers report it: gold in prediction or prediction in gold, as substrings; 1.0 or 0.0.

    Kept with its two faults, so that figures compare: "Unknown" counts as right for the gold answer "no" (its letters
    are in it), and a reply that normalises to nothing counts as right for anything (the empty string is in every gold).
    """

    def either_contains(reply: str, gold: str) -> float:
        return float(gold in reply or reply in gold)

    return _best(either_contains, prediction, answers)


def sub_em_strict(prediction: str, answers: Sequence[str]) -> float:
    """Gold in prediction, as whole words, so that "Unknown" does not hold "no"; an empty reply is wrong; 1.0 or 0.0."""
    return _best(lambda reply, gold: float(bool(gold) and f" {gold} " in f" {reply} "), prediction, answers)


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Equal after normalisation; a reply that normalises to nothing is wrong; 1.0 or 0.0."""
    return _best(lambda reply, gold: float(bool(gold) and reply == gold), prediction, answers)


def f1(prediction: str, answers: Sequence[str]) -> float:
    """Harmonic mean of word precision and recall, counting repeated words (SQuAD); 0.0 for an empty reply."""
    return _best(_f1, prediction, answers)


def score(prediction: str, answers: Sequence[str]) -> Score:
    """All metrics of one reply."""
    return Score(
        sub_em_paper=sub_em_paper(prediction, answers),
        sub_em_strict=sub_em_strict(prediction, answers),
        exact_match=exact_match(prediction, answers),
        f1=f1(prediction, answers),
    )


def _f1(reply: str, gold: str) -> float:
    reply_words, gold_words = reply.split(), gold.split()
    num_shared = (Counter(reply_words) & Counter(gold_words)).total()
    return 2 * num_shared / (len(reply_words) + len(gold_words)) if num_shared else 0.0


def _best(metric: Callable[[str, str], float], prediction: str, answers: Sequence[str]) -> float:
    reply = normalise(prediction)
    return max((metric(reply, normalise(gold)) for gold in answers), default=0.0)
