"""One forward (step 8 of the reading path): `ModelRunner` turns a `Batch` into logits for one model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from antiphon.engine.batch import Batch
from antiphon.engine.models.decoder import Decoder
from antiphon.engine.models.layers import StepInputs
from antiphon.engine.pages import KVCache
from antiphon.kernels.ops import KernelSet


@dataclass(frozen=True)
class StepOutput:
    """`logits [logit_tokens, vocab]` in fp32 and `scores [score_tokens]`: log-probabilities of the batch's targets."""

    logits: Tensor
    scores: Tensor


class PendingStep:
    """A launched batch. On the CPU it is computed when it is launched; `result` waits where a device is behind."""

    def __init__(self, output: StepOutput) -> None:
        self._output = output

    def result(self) -> StepOutput:
        """The step's output."""
        return self._output


class ModelRunner:
    """Runs batches of one model on one KV cache. Reads every field of the batch, changes none.

    `num_token_ids` (the tokenizer's) cuts off the padding of the vocabulary: those ids have no logits.
    """

    def __init__(self, model: Decoder, cache: KVCache, num_token_ids: int) -> None:
        self._model = model
        self._cache = cache
        self._vocab_size = min(num_token_ids, model.config.vocab_size)

    @property
    def kernels(self) -> KernelSet:
        """The model's kernels: the sampler takes its own from them."""
        return self._model.kernels

    @property
    def num_input_ids(self) -> int:
        """Ids below this can be read: those of the embedding, padding included."""
        return self._model.config.vocab_size

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Computes the batch: fills its pages, and gives logits and scores where it asks for them."""
        model = self._model
        cos, sin = model.rotary.at(torch.from_numpy(batch.positions))
        step = StepInputs(cos, sin, torch.from_numpy(batch.slots()), batch.attention_plan(), self._cache)
        hidden = model.forward(torch.from_numpy(batch.token_ids), step)
        logits = torch.empty(0, self._vocab_size)
        if len(batch.logit_tokens):
            wanted = hidden[torch.from_numpy(batch.logit_tokens)]
            logits = model.head(wanted)[:, : self._vocab_size].float()
        scores = torch.empty(0)
        if len(batch.score_tokens):
            scored = hidden[torch.from_numpy(batch.score_tokens)]
            targets = torch.from_numpy(batch.score_targets)
            scores = model.kernels.log_prob(scored, model.head, targets, self._vocab_size)
        return PendingStep(StepOutput(logits, scores))
