"""The flags of `antiphon ask`: their types and help. All are None until given, so that defaults have one home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

_MODELS, _DOCUMENT, _METHOD, _MACHINE, _OUTPUT = "Models", "Document", "Method", "Machine", "Output"

Paths = Annotated[list[str], typer.Argument(metavar="PATH…", help="Files, folders or globs, - for standard input.")]
Arguments = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH… QUESTION",
        help="Files, folders or globs, - for standard input, or @NAME of a saved corpus; last, the question.",
    ),
]
Worker = Annotated[
    str | None,
    typer.Option(
        "--worker",
        metavar="MODEL",
        rich_help_panel=_MODELS,
        help="Reads the shards: an embedded name, a folder, a .gguf file or a hub repository.",
    ),
]
Driver = Annotated[
    str | None,
    typer.Option("--driver", metavar="MODEL", rich_help_panel=_MODELS, help="Asks and answers; named alike."),
]
WorkerRevision = Annotated[
    str | None,
    typer.Option("--worker-revision", metavar="REVISION", rich_help_panel=_MODELS, help="Of the worker's repository."),
]
DriverRevision = Annotated[
    str | None,
    typer.Option("--driver-revision", metavar="REVISION", rich_help_panel=_MODELS, help="Of the driver's repository."),
]
ShardTokens = Annotated[
    int | None,
    typer.Option("--shard-tokens", metavar="N", min=1, rich_help_panel=_DOCUMENT, help="Tokens of a shard, at most."),
]
ShardOverlap = Annotated[
    int | None,
    typer.Option(
        "--shard-overlap",
        metavar="N",
        min=0,
        rich_help_panel=_DOCUMENT,
        help="Tokens that a shard shares with the next.",
    ),
]
Encoding = Annotated[
    str | None,
    typer.Option("--encoding", metavar="NAME", rich_help_panel=_DOCUMENT, help="Of text files that are not UTF-8."),
]
Method = Annotated[
    Literal["parser"] | None,
    typer.Option("--method", metavar="METHOD", rich_help_panel=_METHOD, help="How questions are asked: parser."),
]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", metavar="N", min=1, rich_help_panel=_METHOD, help="Driver turns until it must answer."),
]
MaxNewTokens = Annotated[
    int | None,
    typer.Option(
        "--max-new-tokens", metavar="N", min=1, rich_help_panel=_METHOD, help="Tokens of a worker's reply, at most."
    ),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", metavar="N", min=0.0, rich_help_panel=_METHOD, help="Of workers; 0 is greedy."),
]
Seed = Annotated[
    int | None, typer.Option("--seed", metavar="N", rich_help_panel=_METHOD, help="Of all that is sampled.")
]
Gate = Annotated[
    Literal["first-token", "likelihood", "both", "none"] | None,
    typer.Option(
        "--gate",
        metavar="GATE",
        rich_help_panel=_METHOD,
        help="What decides which rows are decoded: first-token, likelihood, both or none.",
    ),
]
Readers = Annotated[
    int | None,
    typer.Option(
        "--readers",
        metavar="N",
        min=0,
        rich_help_panel=_METHOD,
        help="Shards of a query that pass the gate; 0: all that do not abstain.",
    ),
]
SecondReader = Annotated[
    bool | None,
    typer.Option(
        "--second-reader/--no-second-reader",
        rich_help_panel=_METHOD,
        help="Have the driver's model read the most relevant shards.",
    ),
]
QueryFirst = Annotated[
    bool | None,
    typer.Option(
        "--query-first/--no-query-first", rich_help_panel=_METHOD, help="Have the driver's first turn ask, not answer."
    ),
]
ReplyGrammar = Annotated[
    Literal["unknown-or-json", "verbatim", "none"] | None,
    typer.Option(
        "--reply-grammar",
        metavar="GRAMMAR",
        rich_help_panel=_METHOD,
        help="What workers can write: unknown-or-json, verbatim (true quotes only) or none.",
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        rich_help_panel=_METHOD,
        help="Read while the driver plans, and ask while it writes; the answer is the same.",
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        min=1,
        rich_help_panel=_MACHINE,
        help="Of computation; physical cores if not given.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        rich_help_panel=_MACHINE,
        help="For both models, such as 8GiB; what is free if not given.",
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        "--host-memory",
        metavar="SIZE",
        rich_help_panel=_MACHINE,
        help="Of that, for shards that do not fit the worker's pool, kept as int8 (not exact); none if not given.",
    ),
]
DiskMemory = Annotated[
    str | None,
    typer.Option(
        "--disk-memory",
        metavar="SIZE",
        rich_help_panel=_MACHINE,
        help="Disk for shards that fit no memory, and for saved corpora; half of what is free if not given, 0: none.",
    ),
]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"] | None,
    typer.Option(
        "--dtype", metavar="DTYPE", rich_help_panel=_MACHINE, help="Of weights and KV: auto, float32 or bfloat16."
    ),
]
Quantization = Annotated[
    Literal["none", "int8"] | None,
    typer.Option("--quantization", metavar="KIND", rich_help_panel=_MACHINE, help="Of the weights: none or int8."),
]
KvCacheDtype = Annotated[
    Literal["auto", "float32", "bf16", "int8"] | None,
    typer.Option(
        "--kv-cache-dtype",
        metavar="DTYPE",
        rich_help_panel=_MACHINE,
        help="Of keys and values that are kept: auto, float32, bf16 or int8.",
    ),
]
Speculation = Annotated[
    bool | None,
    typer.Option(
        "--speculation/--no-speculation",
        rich_help_panel=_MACHINE,
        help="Draft what replies quote of their shards: the same replies, sooner.",
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        dir_okay=False,
        rich_help_panel=_OUTPUT,
        help="Write what ran when into FILE, which Perfetto (ui.perfetto.dev) opens.",
    ),
]
Json = Annotated[bool, typer.Option("--json", rich_help_panel=_OUTPUT, help="Print one JSON object and nothing else.")]
Quiet = Annotated[
    bool, typer.Option("--quiet", rich_help_panel=_OUTPUT, help="Print the answer's text and nothing else.")
]
