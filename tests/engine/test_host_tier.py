"""States in host memory: the same bits come back, the least recently used go; int8 loses what it says it loses."""

from __future__ import annotations

import threading

import pytest
import torch
from tiny_states import DTYPES, flipped, random_state, same_state

from antiphon.engine.host_tier import HostTier
from antiphon.engine.tiers import PrefixState, Tier, TierError

_ROOM = 1 << 20


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_put_comes_back_bit_for_bit(dtype: torch.dtype) -> None:
    tier: Tier = HostTier(_ROOM)
    state = random_state(dtype=dtype)
    assert not tier.has(state.key)
    tier.put(state)
    assert tier.has(state.key)
    assert same_state(tier.fetch(state.key), state)
    assert not same_state(tier.fetch(state.key), flipped(state, "k"))
    tier.drop(state.key)
    tier.drop(state.key)
    with pytest.raises(TierError, match=state.key.hex()):
        tier.fetch(state.key)


def test_a_full_tier_keeps_what_it_has_and_refuses_the_next() -> None:
    states = [random_state(seed) for seed in range(4)]
    tier = HostTier(3 * states[0].num_bytes)
    for state in states[:3]:
        tier.put(state)
    with pytest.raises(TierError, match="--host-memory"):
        tier.put(states[3])
    tier.put(states[0])  # there already: it takes its own place
    assert [tier.has(state.key) for state in states] == [True, True, True, False]
    assert tier.num_bytes == 3 * states[0].num_bytes
    tier.close()
    assert tier.num_bytes == 0 and not tier.has(states[0].key)


def test_a_state_larger_than_the_whole_tier_is_refused_and_nothing_goes_for_it() -> None:
    small, large = random_state(0), random_state(1, num_tokens=50)
    tier = HostTier(large.num_bytes - 1)
    tier.put(small)
    with pytest.raises(TierError, match=rf"{large.num_bytes:,} bytes does not fit.*--host-memory"):
        tier.put(large)
    assert tier.has(small.key)
    HostTier(large.num_bytes).put(large)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_comes_back_in_its_dtype_within_half_a_step(dtype: torch.dtype) -> None:
    tier = HostTier(_ROOM, int8=True)
    state = random_state(dtype=dtype, num_tokens=65, head_dim=64)
    tier.put(state)
    found = tier.fetch(state.key)
    assert (found.key, found.token_ids, found.first_token) == (state.key, state.token_ids, state.first_token)
    assert set(found.tensors) == {"k", "v"}
    for name, tensor in state.tensors.items():
        back = found.tensors[name]
        assert back.dtype == dtype and back.is_contiguous()
        step = tensor.float().abs().amax(-1, keepdim=True) / 127
        rounding = 2**-8 * tensor.float().abs().amax() if dtype == torch.bfloat16 else 1e-6
        assert ((back.float() - tensor.float()).abs() <= step / 2 + rounding).all()
        assert not torch.equal(back, tensor), "int8 is lossy"
    vectors = 2 * state.k[..., 0].numel()
    assert tier.num_bytes == vectors * (64 + 4) < state.num_bytes


def test_int8_leaves_what_is_int8_already_and_keeps_zeros() -> None:
    tier = HostTier(_ROOM, int8=True)
    state = random_state(0, torch.int8)
    tier.put(state)
    assert same_state(tier.fetch(state.key), state)
    zeros = random_state(1, torch.float32)
    zeros.k.zero_()
    zeros.v[..., 1:] = 0
    tier.put(zeros)
    found = tier.fetch(zeros.key)
    assert torch.equal(found.k, zeros.k)
    assert torch.allclose(found.v, zeros.v, rtol=1e-6)


@pytest.mark.parametrize("int8", [True, False])
def test_threads_at_once_get_their_own_states_and_the_count_stays_right(int8: bool) -> None:
    states = [random_state(seed, num_tokens=seed + 1) for seed in range(8)]
    expected = {state.key: _through(state, int8) for state in states}
    tier = HostTier(sum(state.num_bytes for state in states) // 3, int8=int8)
    wrong: list[str] = []

    def work(start: int) -> None:
        for turn in range(200):
            state = states[(start + turn * 3) % 8]
            try:
                tier.put(state)
                found = tier.fetch(state.key)
            except TierError:
                continue
            if not same_state(found, expected[state.key]):
                wrong.append(state.key.hex())
            tier.drop(state.key)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    for state in states:
        tier.drop(state.key)
    assert tier.num_bytes == 0


def _through(state: PrefixState, int8: bool) -> PrefixState:
    tier = HostTier(_ROOM, int8=int8)
    tier.put(state)
    return tier.fetch(state.key)
