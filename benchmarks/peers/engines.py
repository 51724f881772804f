"""Engines that a round can be timed with, by name: what has to be prepared for each, and the process that runs it.

| name         | dtypes                               | runs                                   | weights               |
|--------------|--------------------------------------|----------------------------------------|-----------------------|
| antiphon     | auto, float32, bfloat16, int8, int8-kv8 | antiphon_round.py, our environment  | as given              |
| transformers | float32, bfloat16                    | transformers_round.py, our environment | hf_folder.py's        |
| vllm         | bfloat16, float32, w8a8              | vllm_round.py, `setup.sh vllm`         | hf_folder.py's        |
| openvino     | int8, fp16, int4                     | openvino_round.py, `setup.sh openvino` | exported from these  |

`name:dtype`, or the first without one. Prepared weights are kept under ~/.cache/antiphon/peers/models.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_folder import write_hf_folder

from antiphon.engine.errors import AntiphonError, InputError
from antiphon.engine.model_source import ModelSource

_PIPE = subprocess.PIPE
_HERE = Path(__file__).parent
_HOME = Path(os.environ.get("ANTIPHON_PEERS") or Path.home() / ".cache" / "antiphon" / "peers")
_DTYPES = {
    "antiphon": ("auto", "float32", "bfloat16", "int8", "int8-kv8"),
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

    def start(self, model: Path, tokens: Path, threads: int | None, prefill_tokens: int) -> Peer:
        """Its process, loading. A peer in an environment of its own does not see the project's modules."""
        ours = self.kind in ("antiphon", "transformers")
        python = sys.executable if ours else str(_python(self.kind))
        command = [python, str(_HERE / f"{self.kind}_round.py"), "--model", str(model), "--tokens", str(tokens)]
        command += ["--dtype", self.dtype]
        if self.kind != "antiphon":
            command += ["--prefill-tokens" if ours else "--batch-tokens", str(prefill_tokens)]
        if threads:
            command += ["--threads", str(threads)]
        hidden = () if ours else ("PYTHONPATH",)
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        return Peer(self.name, subprocess.Popen(command, stdin=_PIPE, stdout=_PIPE, text=True, env=environment))


@dataclass(frozen=True)
class Peer:
    """A process that loads an engine once, and sleeps between its turns; peer_rounds.py has the other end."""

    name: str
    process: subprocess.Popen[str]

    def __enter__(self) -> Peer:
        """Returns when the engine is loaded."""
        try:
            self._answer()
        except BaseException:
            self.process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()

    def turn(self) -> dict[str, Any]:
        """One turn's result."""
        assert self.process.stdin
        with suppress(BrokenPipeError):  # it ended; the answer's absence is told
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        """The next line that is JSON; libraries may print others."""
        assert self.process.stdout
        for line in self.process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise AntiphonError(f"{self.name} ended with status {self.process.wait()}")


def _python(kind: str) -> Path:
    return _HOME / kind / "bin" / "python"
