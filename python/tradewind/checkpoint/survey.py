"""What is in a directory of checkpoints, told by manifests and sizes: no tensor is read."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from tradewind.checkpoint.errors import CheckpointError
from tradewind.checkpoint.local_directory import LocalDirectory
from tradewind.checkpoint.manifest import Manifest
from tradewind.checkpoint.names import MANIFEST, CommitName
from tradewind.checkpoint.reference import Reference


@dataclass(frozen=True)
class Commit:
    """One that counts. `problem`: what is wrong with its manifest, or with which files are there
    and how large; empty where nothing is. The bytes in them were not read."""

    name: CommitName
    manifest: Manifest | None
    size_bytes: int
    problem: str = ""


@dataclass(frozen=True)
class Ignored:
    """A folder that no restore looks at."""

    folder: str
    why: str


@dataclass
class Survey:
    """`commits`: newest first. `newest`: the first of them without a problem, which a restore would
    try first."""

    where: str
    commits: list[Commit] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)

    @property
    def newest(self) -> CommitName | None:
        return next((commit.name for commit in self.commits if not commit.problem), None)


def survey(reference: Reference) -> Survey:
    """The commits that `reference` names, all of them where it names no step, and, beside them,
    what is ignored. Raises OSError or what the store raises."""
    directory = reference.directory
    committed = directory.committed()
    folders = _folders(reference)
    wanted = reference.names() if committed else []
    found = Survey(directory.where)
    for name in wanted:
        commit = _look(reference, name, folders.get(name.folder, {}))
        if commit is not None:
            found.commits.append(commit)
    counted = {name.folder for name in committed}
    for folder in sorted(folders.keys() - counted):
        if CommitName.parse(folder) is not None:
            found.ignored.append(Ignored(folder, _why(folders[folder], committed)))
    return found


def _look(reference: Reference, name: CommitName, files: dict[str, int]) -> Commit | None:
    """None where it was retired meanwhile."""
    size_bytes = sum(files.values())
    try:
        manifest = reference.manifest(name)
    except CheckpointError as error:
        if name not in reference.directory.committed():
            return None
        return Commit(name, None, size_bytes, str(error))
    problems = []
    for file in manifest.files:
        size = files.get(file.name)
        if size is None:
            problems.append(f"{file.name} is missing")
        elif size != file.size_bytes:
            problems.append(f"{file.name}: expected {file.size_bytes} bytes, has {size}")
    if problems and name not in reference.directory.committed():
        return None
    return Commit(name, manifest, size_bytes, "; ".join(problems))


def _why(files: dict[str, int], committed: list[CommitName]) -> str:
    if MANIFEST not in files:
        return "no manifest: a save that is under way, failed or was killed"
    newest = max((name.attempt for name in committed), default=0)
    return "committed after a later attempt had taken the directory over" + (
        f"; attempt {newest} has the newest that counts" if newest else ""
    )


def _folders(reference: Reference) -> dict[str, dict[str, int]]:
    """Files and their sizes, by folder."""
    directory = reference.directory
    found: dict[str, dict[str, int]] = {}
    if isinstance(directory, LocalDirectory):
        for folder in os.scandir(directory.where):
            if folder.is_dir() and CommitName.parse(folder.name) is not None:
                found[folder.name] = _files(folder.path)
        return found
    for entry in directory.store.entries():  # type: ignore[attr-defined]
        folder_name, _, file = entry.key.partition("/")
        if file:
            found.setdefault(folder_name, {})[file] = entry.size_bytes
    return found


def _files(folder: str) -> dict[str, int]:
    try:
        return {entry.name: entry.stat().st_size for entry in os.scandir(folder)}
    except FileNotFoundError:  # retired meanwhile
        return {}
