"""Names in a directory of checkpoints: one spelling each, ordered as saves began."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tradewind.checkpoint import names
from tradewind.checkpoint.names import CommitName

commits = st.builds(
    CommitName,
    st.integers(0, names.MAX_ATTEMPT),
    st.integers(0, names.MAX_STEP),
    st.text("0123456789abcdef", min_size=16, max_size=16),
)


@given(commits)
def test_a_commits_folder_says_all_of_it(name: CommitName) -> None:
    assert CommitName.parse(name.folder) == name
    assert str(name) == name.folder and len(name.folder) == 44


def test_the_spelling_of_a_folder() -> None:
    name = CommitName(attempt=3, step=10, id="b27c4698e855ca4a")
    assert name.folder == "step-000000000010.000000003.b27c4698e855ca4a"


@pytest.mark.parametrize(
    "folder",
    [
        "",
        "step-10.3.b27c4698e855ca4a",
        "step-000000000010.000000003.B27C4698E855CA4A",
        "step-000000000010.000000003.b27c4698e855ca4a.tmp",
        "step-000000000010.000000003.b27c4698e855ca4a\n",
        "./step-000000000010.000000003.b27c4698e855ca4a",
        "step-00000000001\u0660.000000003.b27c4698e855ca4a",
        "step--00000000010.000000003.b27c4698e855ca4a",
        "Step-000000000010.000000003.b27c4698e855ca4a",
    ],
)
def test_other_folders_are_no_commits(folder: str) -> None:
    assert CommitName.parse(folder) is None


@given(st.lists(commits, min_size=2, max_size=2), st.integers(0, 5), st.integers(0, 5))
def test_a_later_attempt_is_newer_whatever_its_step(
    both: list[CommitName], attempt: int, step: int
) -> None:
    older = CommitName(attempt, both[0].step, both[0].id)
    newer = CommitName(attempt + 1 + step, both[1].step, both[1].id)
    assert older < newer and sorted([newer, older]) == [older, newer] and not newer < older


def test_what_one_process_saves_later_is_newer() -> None:
    made = [CommitName.new(2, step) for step in (50, 10, 10, 0, 99)]
    assert sorted(reversed(made)) == made
    assert len({name.id for name in made}) == len(made)
    assert CommitName.parse(made[0].folder) == made[0]


@pytest.mark.parametrize(
    ("attempt", "step", "id", "error", "words"),
    [
        (-1, 0, "0" * 16, ValueError, "attempt: expected 0 to 999999999, got -1"),
        (10**9, 0, "0" * 16, ValueError, "attempt"),
        (0, 10**12, "0" * 16, ValueError, "step: expected 0 to 999999999999, got 1000000000000"),
        (0, -1, "0" * 16, ValueError, "step"),
        (0, 1.0, "0" * 16, TypeError, "step: expected an integer, got float"),
        (0, True, "0" * 16, TypeError, "step: expected an integer, got bool"),
        (0, 0, "0" * 15, ValueError, "id: expected 16 digits"),
        (0, 0, "../../../../etc/", ValueError, "id"),
        (0, 0, 3, ValueError, "id"),
    ],
)
def test_names_that_no_folder_can_hold(
    attempt: int, step: int, id: str, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match="checkpoint: ") as caught:
        CommitName(attempt, step, id)
    assert words in str(caught.value)


@given(st.integers(0, names.MAX_ATTEMPT))
def test_claims(attempt: int) -> None:
    claim, accepted = names.claim_file(attempt), names.accepted_file(attempt)
    assert len(claim) == 9 and accepted == claim + ".accepted"
    assert names.parse_claim(claim) == attempt and names.parse_accepted(claim) is None
    assert names.parse_accepted(accepted) == attempt and names.parse_claim(accepted) is None


def test_claims_sort_as_their_attempts() -> None:
    attempts = [0, 9, 10, 99, 100, names.MAX_ATTEMPT]
    assert sorted(map(names.claim_file, attempts)) == [names.claim_file(a) for a in attempts]
    with pytest.raises(ValueError, match="attempt"):
        names.claim_file(names.MAX_ATTEMPT + 1)


@pytest.mark.parametrize("file", ["", "3", "000000003.tmp", "000000003.accepted.tmp", " 00000003"])
def test_other_files_are_no_claims(file: str) -> None:
    assert names.parse_claim(file) is None and names.parse_accepted(file) is None


def test_shards() -> None:
    assert names.shard_name(0, 2) == "shard-00000-of-00002.safetensors"
    assert names.parse_shard("shard-00011-of-00012.safetensors") == (11, 12)
    for other in ("shard-00002-of-00002.safetensors", "shard-0-of-1.safetensors", "w.safetensors"):
        assert names.parse_shard(other) is None
    for rank, world_size in ((2, 2), (-1, 2), (0, 0), (0, 100_000)):
        with pytest.raises(ValueError, match="checkpoint: "):
            names.shard_name(rank, world_size)
