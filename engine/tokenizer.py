"""`Tokenizer`: text to token ids and back, with a strict line between plain text and control tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers.decoders import ByteLevel
from transformers import AutoTokenizer, TokenizersBackend

from antiphon.engine.errors import InputError, ModelError

_MAX_TEMPLATE_CHARS = 256 * 1024
_TEMPLATE_FLAGS = frozenset({"enable_thinking", "continue_final_message"})
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json")


class Tokenizer:
    """A byte-level BPE tokenizer and its chat template.

    `hf` is transformers' own fast tokenizer (for grammars and templates); `vocab_size` is the number of ids it can
    produce (a model's vocabulary may be padded above it); any of `eos_ids` ends a turn.
    Raises `ModelError` for a tokenizer that is not byte-level, since streaming could not be exact.
    """

    def __init__(self, hf: TokenizersBackend, eos_ids: Iterable[int]) -> None:
        full = getattr(hf, "backend_tokenizer", None)
        if not isinstance(full, tokenizers.Tokenizer) or not isinstance(full.decoder, ByteLevel):
            raise ModelError(
                f"tokenizer {type(hf).__name__} is not a byte-level BPE tokenizer, the only kind supported"
            )
        self.hf = hf
        self.vocab_size = len(hf)
        self.eos_ids = frozenset(eos_ids)
        self._full = full
        self._added = {token.content: index for index, token in full.get_added_tokens_decoder().items()}
        # The same BPE without any added token: none of their strings is special in a document, neither those marked
        # special (<|im_end|>) nor those that are not (<tool_call>, <think>). The model itself is shared, not copied.
        self._plain = tokenizers.Tokenizer(full.model)
        self._plain.normalizer = full.normalizer
        self._plain.pre_tokenizer = full.pre_tokenizer

    def encode(self, text: str) -> list[int]:
        """Plain text to ids: the string of a special token becomes ordinary text."""
        return list(self._encoding(text).ids)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """`encode`, with each token's start and end in `text`, in characters.

        Tokens that share a character (an emoji over several) have that same character's span. Text should be NFC:
        where normalisation joins characters, the span is that of the first.
        """
        encoding = self._encoding(text)
        return list(encoding.ids), list(encoding.offsets)

    def encode_control(self, text: str) -> list[int]:
        """Template text to ids: strings of special tokens become their ids. Never for text from documents."""
        return list(self._full.encode(_checked(text), add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Ids to text: special tokens as their strings, no clean-up; U+FFFD where the bytes are no whole character."""
        return str(self._full.decode(list(ids), skip_special_tokens=False))

    def token_id(self, text: str) -> int | None:
        """The id of a special (or other added) token, None where there is no such token."""
        return self._added.get(text)

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own, byte-level form of a token; raises `InputError` for an id that does not exist."""
        text = self._full.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            raise InputError(f"token id {token_id} is not in the vocabulary of {self.vocab_size} tokens")
        return str(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **flags: Any,
    ) -> str:
        """The model's own chat template, run by transformers in its immutable sandbox.

        `flags` go to the template: `enable_thinking`, `continue_final_message`. String `arguments` of tool calls are
        decoded first, since templates take mappings. Raises `InputError` for what the template refuses.
        """
        unknown = flags.keys() - _TEMPLATE_FLAGS
        if unknown:
            raise InputError(f"unknown template flags {sorted(unknown)}: allowed are {sorted(_TEMPLATE_FLAGS)}")
        template = self.hf.chat_template
        if not template:
            raise ModelError("this model has no chat template: choose an instruction-tuned model")
        if isinstance(template, str) and len(template) > _MAX_TEMPLATE_CHARS:
            raise ModelError(f"the chat template has {len(template)} characters, at most {_MAX_TEMPLATE_CHARS} are run")
        try:
            rendered = self.hf.apply_chat_template(
                [_with_decoded_arguments(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **flags,
            )
        except Exception as error:  # A template is code from a file: it can raise whatever an expression can.
            raise InputError(f"the chat template cannot render these messages: {error}") from error
        return str(rendered)

    def _encoding(self, text: str) -> tokenizers.Encoding:
        return self._plain.encode(_checked(text), add_special_tokens=False)


def tokenizer_from_folder(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; raises `ModelError` where its files are missing or damaged.

    No code from the folder runs: `auto_map` is ignored, and remote code is refused.
    """
    if not any((folder / name).is_file() for name in _VOCABULARY_FILES):
        raise ModelError(f"{folder} has no tokenizer: {' or '.join(_VOCABULARY_FILES)} is needed")
    try:
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # The tokenizers library raises plain Exception for a damaged tokenizer.json.
        raise ModelError(f"the tokenizer in {folder} cannot be loaded: {error}") from error
    if not isinstance(hf, TokenizersBackend):
        raise ModelError(f"the tokenizer in {folder} is of a kind without tokenizer.json, which is needed")
    configured = [_eos_of(folder / name) for name in ("generation_config.json", "config.json")]
    return Tokenizer(hf, set[int]().union(*configured, _ids(hf.eos_token_id)))


def _eos_of(path: Path) -> set[int]:
    if not path.is_file():
        return set()
    try:
        return _ids(json.loads(path.read_bytes()).get("eos_token_id"))
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _ids(value: Any) -> set[int]:
    """An `eos_token_id`, which is null, one id, or a list of them."""
    found = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int for item in found):
        raise ValueError(f"eos_token_id is {value!r}, an integer or a list of integers is needed")
    return set(found)


def _checked(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"text cannot be encoded: character {error.start} is a lone surrogate") from error
    return text


def _with_decoded_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return dict(message) if not calls else {**message, "tool_calls": [_decoded_call(call) for call in calls]}


def _decoded_call(call: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _decoded_call(call["function"])}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        decoded = json.loads(arguments)
    except (ValueError, RecursionError) as error:
        raise InputError(f"tool call arguments are not JSON: {arguments[:200]!r}") from error
    if not isinstance(decoded, dict):
        raise InputError(f"tool call arguments are not a JSON object: {arguments[:200]!r}")
    return {**call, "arguments": decoded}
