"""Engines that a round can be timed with, by name: what has to be prepared for each, and the command that runs it.

| name         | dtypes                               | runs                                   | weights               |
|--------------|--------------------------------------|----------------------------------------|-----------------------|
| antiphon     | auto, float32, bfloat16, int8, int8-kv8 | `antiphon bench round`              | as given              |
| transformers | float32, bfloat16                    | transformers_round.py, our environment | hf_folder.py's        |
| vllm         | bfloat16, float32, w8a8              | vllm_round.py, `setup.sh vllm`         | hf_folder.py's        |
| openvino     | int8, fp16, int4                     | openvino_round.py, `setup.sh openvino` | exported from these  |

`name:dtype`, or the first without one. Prepared weights are kept under ~/.cache/antiphon/peers/models.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from hf_folder import write_hf_folder

from antiphon.bench_round import BenchRoundOptions
from antiphon.engine.errors import InputError
from antiphon.engine.model_source import ModelSource

_HERE = Path(__file__).parent
_HOME = Path(os.environ.get("ANTIPHON_PEERS") or Path.home() / ".cache" / "antiphon" / "peers")
_ANTIPHON_FLAGS = {
    "auto": (),
    "float32": ("--dtype", "float32"),
    "bfloat16": ("--dtype", "bfloat16"),
    "int8": ("--quantization", "int8"),
    "int8-kv8": ("--quantization", "int8", "--kv-cache-dtype", "int8"),
}
_DTYPES = {
    "antiphon": tuple(_ANTIPHON_FLAGS),
    "transformers": ("float32", "bfloat16"),
    "vllm": ("bfloat16", "float32", "w8a8"),
    "openvino": ("int8", "fp16", "int4"),
}


@dataclass(frozen=True)
class Engine:
    """An engine with a dtype, as the user named it (`vllm:w8a8`)."""

    name: str
    kind: str
    dtype: str

    @staticmethod
    def parse(name: str) -> Engine:
        """From `kind` or `kind:dtype`; raises `InputError` for what is not known or not installed."""
        kind, _, dtype = name.partition(":")
        if kind not in _DTYPES or (dtype and dtype not in _DTYPES[kind]):
            known = "; ".join(f"{kind}: {', '.join(dtypes)}" for kind, dtypes in _DTYPES.items())
            raise InputError(f"engine {name!r} is unknown, known are, with their dtypes, {known}")
        if kind in ("vllm", "openvino") and not _python(kind).exists():
            raise InputError(f"{kind} is not installed in {_HOME}: run benchmarks/peers/setup.sh {kind}")
        return Engine(name, kind, dtype or _DTYPES[kind][0])

    def prepare(self, source: ModelSource) -> Path:
        """The weights in the form this engine reads; converted at the first call, which takes minutes."""
        if self.kind == "antiphon":
            return source.path
        models = _HOME / "models" / source.fingerprint[:16]
        if self.kind in ("transformers", "vllm"):
            return write_hf_folder(source, models / f"hf-{self.dtype}", self.dtype)
        folder = models / f"openvino-{self.dtype}"
        if not folder.is_dir():
            plain = write_hf_folder(source, models / "hf-bfloat16", "bfloat16")
            script = str(_HERE / "openvino_round.py")
            command = [str(_python("openvino")), script, "--model", str(folder), "--dtype", self.dtype]
            subprocess.run([*command, "--export", str(plain)], check=True, stdout=sys.stderr)
        return folder

    def command(self, model: Path, tokens: Path, options: BenchRoundOptions, prefill_tokens: int) -> list[str]:
        """What to run; it prints one JSON object as its last line."""
        if self.kind == "antiphon":
            return [*_antiphon_command(options), *_ANTIPHON_FLAGS[self.dtype]]
        python = _python(self.kind) if self.kind != "transformers" else Path(sys.executable)
        command = [str(python), str(_HERE / f"{self.kind}_round.py"), "--model", str(model), "--tokens", str(tokens)]
        command += ["--dtype", self.dtype]
        command += ["--prefill-tokens" if self.kind == "transformers" else "--batch-tokens", str(prefill_tokens)]
        return [*command, "--threads", str(options.threads)] if options.threads else command

    def run(self, command: list[str]) -> str:
        """The command's last line. A peer in an environment of its own does not see the project's modules."""
        environment = dict(os.environ)
        if self.kind not in ("antiphon", "transformers"):
            environment.pop("PYTHONPATH", None)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        return done.stdout.strip().splitlines()[-1]


def _python(kind: str) -> Path:
    return _HOME / kind / "bin" / "python"


def _antiphon_command(options: BenchRoundOptions) -> list[str]:
    flags = {
        "--model": options.model,
        "--shards": options.num_shards,
        "--shard-tokens": options.shard_tokens,
        "--suffix-tokens": options.suffix_tokens,
        "--new-tokens": options.new_tokens,
        "--rounds": options.num_rounds,
        "--threads": options.threads,
    }
    given = [part for flag, value in flags.items() if value is not None for part in (flag, str(value))]
    return [sys.executable, "-m", "antiphon", "bench", "round", *given, "--json"]
