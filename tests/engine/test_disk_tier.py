"""States on disk: the same bits come back, within the limit, or an error says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from tiny_states import DTYPES, flipped, random_state, same_state

from antiphon.engine.disk_tier import DiskTier
from antiphon.engine.tiers import PrefixState, Tier, TierError

_ROOM = 1 << 20


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "states", _ROOM, temporary=False)
    yield tier
    tier.close()


def state_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def left_overs(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.tmp"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temporary", [True, False])
def test_what_was_put_comes_back_bit_for_bit(dtype: torch.dtype, temporary: bool, tmp_path: Path) -> None:
    tier: Tier = DiskTier(tmp_path, _ROOM, temporary=temporary)
    for seed, (first_token, num_tokens) in enumerate([(0, 1), (0, 63), (64, 64), (128, 65)]):
        state = random_state(seed, dtype, first_token=first_token, num_tokens=num_tokens)
        assert not tier.has(state.key)
        tier.put(state)
        assert tier.has(state.key)
        found = tier.fetch(state.key)
        assert same_state(found, state)
        assert all(tensor.is_contiguous() for tensor in found.tensors.values())
        for name in state.tensors:
            assert not same_state(found, flipped(state, name)), "the comparison sees a single bit"
    tier.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from(DTYPES),
    first_token=st.integers(0, 300),
    sizes=st.tuples(st.integers(1, 130), st.integers(1, 3), st.integers(1, 3), st.integers(1, 33)),
)
def test_any_shape_comes_back(
    tier: DiskTier, seed: int, dtype: torch.dtype, first_token: int, sizes: tuple[int, int, int, int]
) -> None:
    num_tokens, layers, kv_heads, head_dim = sizes
    state = random_state(
        seed,
        dtype,
        first_token=first_token,
        num_tokens=num_tokens,
        layers=layers,
        kv_heads=kv_heads,
        head_dim=head_dim,
    )
    tier.put(state)
    assert same_state(tier.fetch(state.key), state)
    tier.drop(state.key)


def test_numbers_that_are_none_keep_their_bits(tier: DiskTier) -> None:
    state = random_state(dtype=torch.float32)
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    state.k.view(-1)[:4] = odd
    state.k.view(torch.int32).view(-1)[4] = 0x7FC0_1234  # a NaN with a payload
    tier.put(state)
    assert same_state(tier.fetch(state.key), state)


def test_the_file_is_safetensors_to_others(tier: DiskTier, tmp_path: Path) -> None:
    state = random_state(dtype=torch.int8)
    tier.put(state)
    (path,) = state_files(tmp_path)
    digits = state.key.hex()
    assert path == tmp_path / "states" / digits[:2] / f"{digits}.safetensors"
    with safe_open(str(path), framework="pt") as file:
        assert file.metadata()["key"] == digits
        assert tuple(file.get_tensor("token_ids").tolist()) == state.token_ids
        for name, tensor in state.tensors.items():
            assert torch.equal(file.get_tensor(name), tensor)


def test_bytes_are_counted_at_the_start_and_kept(tmp_path: Path) -> None:
    states = [random_state(seed, num_tokens=seed + 1) for seed in range(5)]
    tier = DiskTier(tmp_path, _ROOM, temporary=False)
    for state in states:
        tier.put(state)
    tier.put(states[0])
    tier.drop(states[1].key)
    tier.drop(states[1].key)
    on_disk = sum(path.stat().st_size for path in state_files(tmp_path))
    assert tier.num_bytes == on_disk > sum(state.num_bytes for state in (*states[2:], states[0]))
    assert set(tier.keys()) == {state.key for state in (*states[2:], states[0])}
    assert tier.file_bytes(states[0].key) > states[0].num_bytes
    assert tier.file_bytes(states[1].key) == 0
    tier.close()
    again = DiskTier(tmp_path, _ROOM, temporary=False)
    assert again.num_bytes == on_disk
    assert same_state(again.fetch(states[2].key), states[2])
    again.close()


def test_a_state_beyond_the_limit_is_refused_with_the_knob(tmp_path: Path) -> None:
    first, second = random_state(0), random_state(1)
    probe = DiskTier(tmp_path / "probe", _ROOM, temporary=True)
    probe.put(first)
    file_bytes = probe.num_bytes
    probe.close()
    exact = DiskTier(tmp_path / "exact", file_bytes, temporary=True)
    exact.put(first)
    with pytest.raises(TierError, match=rf"{file_bytes:,} bytes does not fit.*--disk-memory"):
        exact.put(second)
    assert exact.has(first.key) and not exact.has(second.key)
    exact.drop(first.key)
    exact.put(second)
    exact.close()
    short = DiskTier(tmp_path / "short", file_bytes - 1, temporary=True)
    with pytest.raises(TierError, match="--disk-memory"):
        short.put(first)
    assert state_files(tmp_path / "short") == []
    short.close()


def test_room_that_another_process_made_is_found(tmp_path: Path) -> None:
    states = [random_state(seed) for seed in range(2)]
    first = DiskTier(tmp_path, 2000, temporary=False)  # room for one
    other = DiskTier(tmp_path, _ROOM, temporary=False)
    first.put(states[0])
    other.drop(states[0].key)
    first.put(states[1])
    assert first.num_bytes == first.file_bytes(states[1].key)
    first.close()
    other.close()


def test_an_absent_state_is_an_error_that_names_it(tier: DiskTier) -> None:
    key = bytes(32)
    with pytest.raises(TierError, match=f"no state {key.hex()}"):
        tier.fetch(key)
    tier.drop(key)
    assert tier.num_bytes == 0


@pytest.mark.parametrize(
    "odd",
    [
        PrefixState(bytes(32), (1, 2), 1, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4)),
        PrefixState(bytes(32), (1, 2), 2, torch.zeros(1, 1, 0, 4), torch.zeros(1, 1, 0, 4)),
        PrefixState(bytes(32), (1, 2), 0, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 8)),
        PrefixState(bytes(32), (1, 2), 0, torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4).bfloat16()),
        PrefixState(bytes(32), (1, 2), 0, torch.zeros(1, 1, 2, 4).half(), torch.zeros(1, 1, 2, 4).half()),
        PrefixState(bytes(32), (1, 2), 0, torch.zeros(1, 1, 2, 4).char(), torch.zeros(1, 1, 2, 4).char()),
        PrefixState(bytes(32), (1, 2), 0, torch.zeros(2, 4), torch.zeros(2, 4)),
    ],
)
def test_tensors_that_are_no_state_are_refused_when_they_are_put(odd: PrefixState, tier: DiskTier) -> None:
    with pytest.raises(TierError, match="cannot be kept"):
        tier.put(odd)
    assert not tier.has(odd.key) and tier.num_bytes == 0


def test_temporary_states_go_when_the_tier_is_closed(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, _ROOM, temporary=True)
    state = random_state()
    tier.put(state)
    other = DiskTier(tmp_path, _ROOM, temporary=True)
    assert other.num_bytes == 0 and not other.has(state.key), "tiers of one folder share nothing"
    assert same_state(tier.fetch(state.key), state), "a second tier at once takes nothing from the first"
    tier.close()
    tier.close()
    assert state_files(tmp_path) == []
    with pytest.raises(TierError):
        tier.fetch(state.key)
    with pytest.raises(TierError):
        tier.put(state)
    assert state_files(tmp_path) == []
    other.close()


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TierError, match=r"file.*choose another folder"):
        DiskTier(tmp_path / "file" / "states", _ROOM, temporary=False)


@pytest.mark.parametrize(("temporary", "num_syncs"), [(True, 0), (False, 1)])
def test_only_what_outlives_the_process_waits_for_the_disk(
    temporary: bool, num_syncs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    tier = DiskTier(tmp_path, _ROOM, temporary=temporary)
    tier.put(random_state())
    assert len(synced) == num_syncs
    assert left_overs(tmp_path) == []
    tier.close()
