"""Tiny random models: the same weights in transformers and in Antiphon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from antiphon.engine.config import config_from_hf
from antiphon.engine.grammar import GrammarCompiler
from antiphon.engine.models.decoder import Decoder
from antiphon.engine.pages import KVCache, PagePool
from antiphon.engine.prefix_store import PrefixStore
from antiphon.engine.runner import ModelRunner
from antiphon.engine.tokenizer import Tokenizer
from antiphon.kernels.ops import KernelContext, KernelSet
from antiphon.kernels.registry import choose_kernels
from antiphon.scheduler.client import LaneClient
from antiphon.scheduler.core import Core
from antiphon.scheduler.lane import Eviction, Lane
from antiphon.scheduler.residency import Tiers
from antiphon.scheduler.row import Row

VOCABULARY = 211
_SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    ids: list[int] = np.random.default_rng([length, seed]).integers(0, VOCABULARY, length).tolist()
    return ids


class StateDictCheckpoint:
    """A checkpoint over a transformers model's own tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def close(self) -> None:
        pass


def random_hf_model(family: str, *, tied: bool = False, seed: int = 0) -> PreTrainedModel:
    """A random fp32 model; head size 16, 2 KV heads, odd group and hidden sizes as real ones have."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 88,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    }
    if family == "qwen2":
        model: PreTrainedModel = Qwen2ForCausalLM(Qwen2Config(**{**sizes, "hidden_size": 96}))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    return model.eval()


def hf_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The tensors a checkpoint of this model holds: a tied head is not written."""
    tensors = {name: value.detach() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight")
    return tensors


@dataclass
class TinyEngine:
    """One lane over a tiny model, stepped by hand."""

    core: Core
    lane: Lane

    def run(self, rows: list[Row]) -> None:
        """Submits rows and steps until all ended; checks that no page is lost."""
        for row in rows:
            self.lane.submit(row)
        self.core.run_until_idle()


def tiny_engine(
    model: PreTrainedModel,
    *,
    num_pages: int = 64,
    step_tokens: int = 96,
    dtype: torch.dtype = torch.float32,
    weight_dtype: torch.dtype | None = None,
    kv_dtype: torch.dtype | None = None,
    only: str | None = None,
    rotated: bool | None = None,
    wrap_kernels: Callable[[KernelSet], KernelSet] = lambda kernels: kernels,
    eos_ids: frozenset[int] = frozenset(),
    tiers: Tiers | None = None,
    eviction: Eviction = "sweep",
    speculation: bool = True,
) -> TinyEngine:
    """An engine with poisoned pages on this model's weights; `weight_dtype` and `kv_dtype` are `dtype` where they are
    not given, `only` forces one kind of kernels, `rotated` is the decoder's."""
    config = config_from_hf(model.config.to_dict())
    weight_dtype, kv_dtype = weight_dtype or dtype, kv_dtype or dtype
    context = KernelContext("cpu", dtype, weight_dtype, kv_dtype, config.head_dim)
    kernels = wrap_kernels(choose_kernels(context, only=only))
    decoder = Decoder.load(config, kernels, StateDictCheckpoint(hf_tensors(model)), dtype, weight_dtype, rotated)
    cache = KVCache(config, num_pages, kv_dtype, kernels, poison=True)
    store = PrefixStore(PagePool(num_pages), cache, "tiny")
    runner = ModelRunner(decoder, cache, VOCABULARY)
    lane = Lane(
        "tiny",
        runner,
        store,
        eos_ids,
        step_tokens=step_tokens,
        tiers=tiers,
        eviction=eviction,
        speculation=speculation,
    )
    return TinyEngine(Core({"tiny": lane}), lane)


def tiny_tokenizer() -> Tokenizer:
    """A tokenizer of `VOCABULARY` ids, one per character: blank, newline, ASCII and some more bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda char: (char not in "ĠĊ", char))
    kept = alphabet[: VOCABULARY - len(_SPECIAL)]
    plain = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(kept)}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": list(_SPECIAL)})
    return Tokenizer(fast, {fast.convert_tokens_to_ids("<|im_end|>")})


@contextmanager
def running_client(engine: TinyEngine) -> Iterator[LaneClient]:
    """A client of the engine's lane, on a started core that is closed at the end, with every page accounted for."""
    engine.core.start()
    try:
        yield LaneClient(engine.core, engine.lane, GrammarCompiler(tiny_tokenizer(), VOCABULARY))
        engine.core.call(engine.core.check_integrity).result(60)
    finally:
        engine.core.close()
