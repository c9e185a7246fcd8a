"""The ranks that tests of this folder run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from share.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made
