"""`SavedCorpora`: corpora that were read once for ever, by name. Two processes may share the folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from antiphon.engine.cache_folder import file_lock, write_whole
from antiphon.engine.disk_tier import DiskTier
from antiphon.engine.errors import AntiphonError, InputError
from antiphon.engine.tiers import Tier, TierError
from antiphon.saved_manifest import Manifest, check_corpus_name, is_corpus_name

MAX_MANIFEST_BYTES = 1 << 31
_SUFFIX = ".json"


@dataclass(frozen=True)
class Verification:
    """What `verify` found: the shards whose states are good, those that were damaged (each with what was wrong; such a
    state is deleted), and those that have none. The last two are read again when the corpus is next asked."""

    good: tuple[int, ...]
    damaged: tuple[tuple[int, str], ...]
    missing: tuple[int, ...]


class SavedCorpora:
    """Manifests and states in one folder, made if missing:

    ```
    names/NAME.json             a corpus's manifest, written whole and then renamed
    states/aa/KEY.safetensors   the state of a shard; corpora with the same shard share it (engine/disk_tier.py)
    lock                        held while manifests are written or removed
    ```
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = folder / "names"
        try:
            self._names.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(
                f"saved corpora: {folder} cannot be used ({error.strerror}): set ANTIPHON_CACHE"
            ) from error

    def tier(self, limit_bytes: int) -> DiskTier:
        """The states of all corpora, as a tier of at most `limit_bytes`; close it."""
        return DiskTier(self._folder / "states", limit_bytes, temporary=False)

    def names(self) -> tuple[str, ...]:
        """The names of all corpora, sorted; their manifests may still be damaged."""
        found = (path.name.removesuffix(_SUFFIX) for path in self._names.glob(f"*{_SUFFIX}"))
        return tuple(sorted(filter(is_corpus_name, found)))

    def save(self, manifest: Manifest) -> None:
        """Saves a manifest, whose states are in the tier by now, under its name. One that had the name is replaced, and
        states go that only it used. Raises InputError for one that is too large, AntiphonError where it cannot be
        written (then the old one stands)."""
        data = manifest.to_bytes()
        if len(data) > MAX_MANIFEST_BYTES:
            raise InputError(
                f"corpus {manifest.name!r}: its text takes {len(data):,} bytes, at most {MAX_MANIFEST_BYTES:,} are "
                "saved: save fewer documents under one name"
            )
        path = self._path(manifest.name)
        with self._locked():
            before = self._keys(manifest.name)
            for left in self._names.glob("*.tmp"):  # of a killed process: whoever writes holds the lock
                left.unlink()
            write_whole(path, data)
            self._drop_unused(before)

    def load(self, name: str) -> Manifest:
        """A corpus's manifest; raises InputError where there is none, or it is damaged or foreign."""
        path = self._path(name)
        try:
            if path.exists() and not path.is_file():  # a pipe would block
                raise ValueError("it is no regular file")
            with path.open("rb") as file:
                data = file.read(MAX_MANIFEST_BYTES + 1)
            if len(data) > MAX_MANIFEST_BYTES:
                raise ValueError(f"it has more than {MAX_MANIFEST_BYTES:,} bytes")
            manifest = Manifest.from_bytes(data)
            if manifest.name != name:
                raise ValueError(f"it is that of {manifest.name!r}")
        except FileNotFoundError:
            raise self._absent(name) from None
        except OSError as error:
            raise InputError(f"corpus {name!r}: {path} cannot be read ({error.strerror})") from error
        except ValueError as error:
            raise InputError(
                f"corpus {name!r}: {path} cannot be used: {error}. Remove it with `antiphon corpora remove {name}`, "
                "and save the documents again"
            ) from error
        return manifest

    def remove(self, name: str) -> None:
        """Removes a corpus, and the states that no other one uses. Of a damaged one it cannot be known which they were:
        then all states go that no corpus uses. Raises InputError where there is none of this name."""
        path = self._path(name)
        with self._locked():
            if not path.exists():
                raise self._absent(name)
            keys = self._keys(name)
            path.unlink()
            self._drop_unused(keys)

    def verify(self, name: str, tier: Tier) -> Verification:
        """Fetches and checks every state of a corpus."""
        good: list[int] = []
        damaged: list[tuple[int, str]] = []
        missing: list[int] = []
        for index, shard in enumerate(self.load(name).shards):
            if not tier.has(shard.key):
                missing.append(index)
                continue
            try:
                num_tokens = len(tier.fetch(shard.key).token_ids)
            except TierError as error:
                damaged.append((index, str(error)))
                continue
            if num_tokens != shard.num_tokens:
                tier.drop(shard.key)
                damaged.append((index, f"it has {num_tokens} tokens, and the corpus says {shard.num_tokens}"))
            else:
                good.append(index)
        return Verification(tuple(good), tuple(damaged), tuple(missing))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """OSErrors in it, and of the lock itself, become errors that say what to do."""
        try:
            with file_lock(self._folder / "lock"):
                yield
        except OSError as error:
            raise AntiphonError(
                f"saved corpora: {self._names} cannot be written ({error.strerror}): free space there, or choose "
                "another folder with ANTIPHON_CACHE"
            ) from error

    def _absent(self, name: str) -> InputError:
        return InputError(f"there is no saved corpus {name!r}; saved are: {', '.join(self.names()) or 'none'}")

    def _path(self, name: str) -> Path:
        check_corpus_name(name)
        return self._names / f"{name}{_SUFFIX}"

    def _keys(self, name: str) -> frozenset[bytes] | None:
        """What a corpus uses; None where its manifest does not say."""
        if not self._path(name).exists():
            return frozenset()
        try:
            return self.load(name).keys
        except InputError:
            return None

    def _drop_unused(self, keys: Iterable[bytes] | None) -> None:
        """Of these states (None: of all) those go that no corpus uses. One that cannot be read uses none."""
        if keys is not None and not keys:
            return
        used = frozenset[bytes]().union(*(self._keys(name) or () for name in self.names()))
        with suppress(TierError), closing(self.tier(0)) as tier:
            for key in list(tier.keys()) if keys is None else keys:
                if key not in used:
                    tier.drop(key)
