"""Tables in Markdown from trial rows: rightness, rounds, seconds and recall, by configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from antiphon.evaluation.metrics import Score, score

_PHASES = ("read", "rounds", "driver", "total")
_HEADER = (
    "configuration",
    "n",
    "Sub_EM paper",
    "Sub_EM strict",
    "EM",
    "F1",
    "rounds",
    *(f"{phase} s" for phase in _PHASES),
    "recall findings",
    "recall readers",
)


@dataclass(frozen=True)
class ConfigurationSummary:
    """One configuration's trials. Shares are 0 to 1; `rounds`, `seconds` and `recall_…` hold (mean, median) or None."""

    configuration: str
    num_trials: int
    sub_em_paper: float
    sub_em_strict: float
    exact_match: float
    f1: float
    rounds: tuple[float, float] | None
    seconds: Mapping[str, tuple[float, float] | None]
    recall_findings: tuple[float, float] | None
    recall_readers: tuple[float, float] | None


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[ConfigurationSummary]:
    """One summary for each configuration, in the order of first appearance. No row is left out of a mean of rightness.

    A row holds `configuration`, `prediction`, `answers`, and where they exist `num_rounds`, `seconds` (by phase),
    `recall_findings` and `recall_readers`; one that holds an `error` counts as wrong by every metric.
    """
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(str(row["configuration"]), []).append(row)
    return [_summarise(configuration, trials) for configuration, trials in grouped.items()]


def markdown_summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """The table of `summarise`: shares in per cent (recall: the mean), the rest as mean / median."""
    return markdown_table(_HEADER, [_cells(summary) for summary in summarise(rows)])


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left, all others to the right; `|` in a cell is escaped."""
    lines = [
        list(header),
        ["---", *["--:"] * (len(header) - 1)],
        *([cell.replace("|", "\\|") for cell in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _summarise(configuration: str, trials: Sequence[Mapping[str, Any]]) -> ConfigurationSummary:
    scores = [_score(trial) for trial in trials]
    return ConfigurationSummary(
        configuration=configuration,
        num_trials=len(trials),
        sub_em_paper=mean(s.sub_em_paper for s in scores),
        sub_em_strict=mean(s.sub_em_strict for s in scores),
        exact_match=mean(s.exact_match for s in scores),
        f1=mean(s.f1 for s in scores),
        rounds=_mean_median(trial.get("num_rounds") for trial in trials),
        seconds={phase: _mean_median((t.get("seconds") or {}).get(phase) for t in trials) for phase in _PHASES},
        recall_findings=_mean_median(trial.get("recall_findings") for trial in trials),
        recall_readers=_mean_median(trial.get("recall_readers") for trial in trials),
    )


def _score(trial: Mapping[str, Any]) -> Score:
    # A failed trial's empty prediction would be right by the paper's Sub_EM, but nothing was replied at all.
    return Score(0.0, 0.0, 0.0, 0.0) if trial.get("error") else score(trial["prediction"], trial["answers"])


def _cells(summary: ConfigurationSummary) -> list[str]:
    shares = (summary.sub_em_paper, summary.sub_em_strict, summary.exact_match, summary.f1)
    return [
        summary.configuration,
        str(summary.num_trials),
        *(f"{100 * share:.1f}" for share in shares),
        _pair(summary.rounds),
        *(_pair(summary.seconds[phase]) for phase in _PHASES),
        *(
            "–" if pair is None else f"{100 * pair[0]:.1f}"
            for pair in (summary.recall_findings, summary.recall_readers)
        ),
    ]


def _pair(pair: tuple[float, float] | None) -> str:
    return "–" if pair is None else f"{pair[0]:.1f} / {pair[1]:.1f}"


def _mean_median(values: Iterable[float | None]) -> tuple[float, float] | None:
    known = [value for value in values if value is not None]
    return (mean(known), median(known)) if known else None
