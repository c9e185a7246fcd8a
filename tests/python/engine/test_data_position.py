"""A run that goes on from a checkpoint sees the batches that an uninterrupted one would have seen,
bit for bit, whatever the loader is, or says by name why it cannot."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from engine.data_cases import (
    EPOCHS,
    NUM_SAMPLES,
    Make,
    Noisy,
    NoisyIterable,
    NoisyStream,
    engine_of,
    loader,
    noisy,
    noisy_collate,
    run,
    through_checkpoint,
)
from torch.utils.data import DataLoader, Sampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import tradewind as tw
from share.ranks import Ranks
from tradewind.engine.batch_sources import Cut
from tradewind.engine.data_position import DataPosition
from tradewind.engine.loop import run_batches


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class DrawsAsItGoes(Sampler[int]):
    """Draws each index from generators of its own and of everybody, when it is asked for."""

    def __init__(self) -> None:
        self.rng = random.Random(5)
        self.numpy_rng = np.random.default_rng(5)

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        for _ in range(NUM_SAMPLES):
            drawn = self.rng.randrange(100) + int(self.numpy_rng.integers(100))
            drawn += random.randrange(100) + int(torch.randint(100, ()))
            yield drawn % NUM_SAMPLES


class KnowsItsState(Sampler[int]):
    """Another order each epoch, by a count that only its state_dict shows."""

    def __init__(self) -> None:
        self.epoch = 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter([(index * 3 + self.epoch) % NUM_SAMPLES for index in range(NUM_SAMPLES)])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


class TakesLists(Noisy):
    """Loads a whole batch at once."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class DoublesItsBatches(DataLoader[Any]):
    def __iter__(self) -> Any:
        for batch in super().__iter__():
            yield batch
            yield -batch


weights = torch.linspace(0.1, 1.0, NUM_SAMPLES)

LOADERS: dict[str, Make] = {
    "in order": loader,
    "shuffled": lambda: loader(shuffle=True),
    "shuffled, drop_last": lambda: loader(shuffle=True, drop_last=True),
    "generator of its own": lambda: loader(shuffle=True, generator=generator()),
    "workers": lambda: loader(shuffle=True, num_workers=2),
    "workers kept": lambda: loader(
        shuffle=True, num_workers=2, persistent_workers=True, generator=generator()
    ),
    "samples": lambda: loader(shuffle=True, batch_size=None, collate_fn=lambda x: x.unsqueeze(0)),
    "collate draws": lambda: loader(shuffle=True, collate_fn=noisy_collate, num_workers=1),
    "lists": lambda: DataLoader(TakesLists(), batch_size=4, shuffle=True),
    "weighted": lambda: loader(sampler=WeightedRandomSampler(weights, 30, generator=generator())),
    "sampler draws": lambda: loader(sampler=DrawsAsItGoes()),
    "sampler has state": lambda: loader(sampler=KnowsItsState()),
    "batch sampler": lambda: DataLoader(Noisy(), batch_sampler=[[1, 2], [3], [4, 5, 6], [7, 0]]),
    "list": lambda: [torch.full((2, 4), float(index)) for index in range(5)],
    "stream": lambda: DataLoader(NoisyStream(), batch_size=4),
    "stream, generator": lambda: DataLoader(
        NoisyStream(), batch_size=4, num_workers=2, generator=generator()
    ),
    "iterable": NoisyIterable,
    "own iteration": lambda: DoublesItsBatches(Noisy(), batch_size=8, shuffle=True),
    "stateful": lambda: StatefulDataLoader(Noisy(), batch_size=4, shuffle=True),
    "stateful, generator": lambda: StatefulDataLoader(
        Noisy(), batch_size=4, shuffle=True, generator=generator()
    ),
    "stateful stream": lambda: StatefulDataLoader(NoisyStream(), batch_size=4),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_a_run_goes_on_with_the_same_batches(kind: str) -> None:
    make = LOADERS[kind]
    whole = run(make).seen
    each = len(whole) // EPOCHS
    # The beginning, the middle, the ends of an epoch and its neighbours, the last batch but one.
    for stop in sorted({1, each // 2, each, each + 1, 2 * each + 2, len(whole) - 1}):
        first = run(make, stop=stop)
        rest = run(make, state=first.state, seed=99)
        assert first.seen + rest.seen == whole, f"after {stop} of {len(whole)}"


@pytest.mark.parametrize("kind", ("shuffled", "workers", "generator of its own", "iterable"))
def test_a_run_goes_on_more_than_once(kind: str) -> None:
    make = LOADERS[kind]
    whole, seen, state = run(make).seen, [], None
    while len(seen) < len(whole):
        part = run(make, state=state, stop=min(4, len(whole) - len(seen)), seed=len(seen))
        seen, state = seen + part.seen, part.state
    assert seen == whole
    assert run(make, state=state).seen == []


def test_stateful_loaders_with_workers_keep_the_order() -> None:
    """What their workers draw, the loader does not keep; which samples come, it does."""

    def make() -> Any:
        return StatefulDataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2)

    def order(seen: list[Any]) -> list[Any]:
        return [[row[0] for row in batch] for batch in seen]

    whole = order(run(make).seen)
    for stop in (2, 6, 7):
        first = run(make, stop=stop)
        assert order(first.seen) + order(run(make, state=first.state).seen) == whole


def test_what_was_taken_is_not_loaded_again() -> None:
    first = run(LOADERS["shuffled"], stop=9)
    rest = run(LOADERS["shuffled"], state=first.state)
    assert rest.loader.dataset.num_loaded == sum(len(batch) for batch in rest.seen)
    assert rest.loader.dataset.num_loaded < EPOCHS * NUM_SAMPLES - 8 * 4


def test_augmentation_is_the_same_whoever_loads() -> None:
    here = run(LOADERS["shuffled"]).seen
    for num_workers in (1, 3):
        assert run(lambda n=num_workers: loader(shuffle=True, num_workers=n)).seen == here  # type: ignore[misc]
    # And no two batches draw alike.
    drawn = [row[1] for batch in here for row in batch]
    assert len(set(drawn)) == len(drawn) == EPOCHS * NUM_SAMPLES


def test_epochs_and_calls_have_orders_of_their_own() -> None:
    seen = [row[0] for batch in run(LOADERS["shuffled"]).seen for row in batch]
    epochs = [seen[i : i + NUM_SAMPLES] for i in range(0, len(seen), NUM_SAMPLES)]
    assert all(sorted(epoch) == list(range(NUM_SAMPLES)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == EPOCHS


@pytest.mark.parametrize("num_workers", (0, 2))
@pytest.mark.parametrize("kind", ("shuffled", "stream", "iterable", "list"))
def test_reading_draws_nothing_from_the_models_random_numbers(kind: str, num_workers: int) -> None:
    made = LOADERS[kind]()
    if isinstance(made, DataLoader):
        shuffles = {"shuffle": True} if kind == "shuffled" else {}
        made = DataLoader(made.dataset, batch_size=4, num_workers=num_workers, **shuffles)
    with engine_of() as engine:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        for batch in run_batches(engine, engine._meter, made, 2, "off", DataPosition()):
            engine.step(engine(batch).sum())
    drawn = torch.rand(4).tolist(), random.random(), np.random.rand()
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    assert drawn == (torch.rand(4).tolist(), random.random(), np.random.rand())


def test_without_checkpoints_reading_is_torchs() -> None:
    torch.manual_seed(1), random.seed(1), np.random.seed(1)
    expected = [batch.tolist() for _ in range(2) for batch in loader(shuffle=True)]
    with engine_of() as engine:
        torch.manual_seed(1), random.seed(1), np.random.seed(1)
        found = engine.batches(loader(shuffle=True), epochs=2, progress="off")
        assert [batch.tolist() for batch in found] == expected


# --- which batches count --------------------------------------------------------------------------


@pytest.mark.parametrize("stop", (1, 2, 3, 6, 7, 8, 13))
@pytest.mark.parametrize("kind", ("shuffled", "workers", "stateful"))
def test_microbatches_without_an_update_come_again(kind: str, stop: int) -> None:
    make = LOADERS[kind]
    whole = run(make, accumulate=3)
    first = run(make, accumulate=3, stop=stop)
    rest = run(make, accumulate=3, state=first.state)
    assert first.seen[: stop // 3 * 3] + rest.seen == whole.seen
    assert first.steps + rest.steps == whole.steps


def test_a_batch_that_was_only_yielded_comes_again() -> None:
    whole = run(LOADERS["workers"]).seen
    torch.manual_seed(0), random.seed(0), np.random.seed(0)
    made, position = LOADERS["workers"](), DataPosition()
    with engine_of() as engine:
        reading = run_batches(engine, engine._meter, made, EPOCHS, "off", position)
        for _ in range(4):
            engine.step(engine(next(reading)).sum())
        assert next(reading).tolist() == whole[4]
        state = through_checkpoint(position.state_dict())
    assert run(LOADERS["workers"], state=state).seen == whole[4:]


def test_the_position_before_anything_is_the_beginning() -> None:
    state = through_checkpoint(DataPosition().state_dict())
    assert run(LOADERS["shuffled"], state=state).seen == run(LOADERS["shuffled"]).seen


def test_the_random_state_is_restored_when_the_data_is_there() -> None:
    first = run(LOADERS["stream"], stop=4)
    position, order = DataPosition(say=lambda text: None), []
    position.load_state_dict(first.state)
    position.on_resumed = lambda: order.append("restored")
    made = DataLoader(NoisyStream(), batch_size=4)
    made.collate_fn = lambda samples: (order.append("read"), torch.stack(samples))[1]
    with engine_of() as engine:
        for batch in run_batches(engine, engine._meter, made, EPOCHS, "off", position):
            order.append("given")
            engine.step(engine(batch).sum())
    assert order[:8] == ["read"] * 5 + ["restored", "given", "read"]
    assert order.count("restored") == 1


# --- more than one call ---------------------------------------------------------------------------


def script(
    stop: int, state: Any, seed: int, evaluates: bool = True, begin: int = 0
) -> tuple[list[Any], Any]:
    """Two loaders one after the other, an evaluation after each; `stop` counts training batches."""
    torch.manual_seed(seed)
    position, seen = DataPosition(say=lambda text: None), []
    if state is not None:
        position.load_state_dict(state)
    with engine_of() as engine:
        engine.num_steps = begin

        def batches(made: Any, epochs: int) -> Iterator[Any]:
            return run_batches(engine, engine._meter, made, epochs, "off", position)

        num_trained = 0
        for made in (loader(shuffle=True), loader(shuffle=True, batch_size=7), loader()):
            for batch in batches(made, 2):
                seen.append(("train", batch.tolist()))
                engine.step(engine(batch).sum())
                num_trained += 1
                if evaluates and engine.num_steps % 5 == 0:
                    seen.append(("nested", [b.tolist() for b in batches(loader(shuffle=True), 1)]))
                if num_trained == stop:
                    return seen, through_checkpoint(position.state_dict())
            if evaluates:
                seen.append(("evaluation", [b.tolist() for b in batches(loader(), 1)]))
    return seen, None


@pytest.mark.parametrize("evaluates", (False, True))
def test_calls_are_told_apart_by_their_order(evaluates: bool) -> None:
    whole, _ = script(10_000, None, seed=0, evaluates=evaluates)
    trained = [seen for kind, seen in whole if kind == "train"]
    assert len(trained) == 12 + 8 + 12
    for stop in (3, 12, 13, 17, 20, 21, 31):
        first, state = script(stop, None, seed=0, evaluates=evaluates)
        rest, _ = script(10_000, state, seed=50, evaluates=evaluates, begin=stop)
        assert [seen for kind, seen in first + rest if kind == "train"] == trained, stop
        # Evaluations that had ended are made again, on the same batches.
        again = [seen for kind, seen in rest if kind == "evaluation"]
        assert again == [seen for kind, seen in whole if kind == "evaluation"]


def test_a_finished_run_yields_nothing_and_says_so() -> None:
    whole = run(LOADERS["generator of its own"])
    again = run(LOADERS["generator of its own"], state=whole.state)
    assert again.seen == [] and again.steps == 0
    assert len(again.said) == 1 and "nothing is left to do" in again.said[0]
    # Stopped with its last batch, before the call could see that it was the last one.
    last = run(LOADERS["stream"], stop=len(whole.seen))
    again = run(LOADERS["stream"], state=last.state)
    assert again.seen == []
    assert "made at its end; nothing is left" in again.said[-1]


@pytest.mark.parametrize("kind", ("shuffled", "generator of its own", "stateful, generator"))
def test_a_finished_run_goes_on_where_epochs_were_added(kind: str) -> None:
    make = LOADERS[kind]
    whole = run(make, epochs=EPOCHS + 2).seen
    first = run(make)
    rest = run(make, state=first.state, epochs=EPOCHS + 2)
    assert first.seen + rest.seen == whole


@pytest.mark.parametrize("kind", ("generator of its own", "sampler has state", "stateful"))
def test_a_loader_that_another_call_used_up_goes_on_after_it(kind: str) -> None:
    """What a call that had ended drew from the loader's generators stays drawn."""

    def thrice(state: Any) -> tuple[list[Any], Any]:
        position, seen = DataPosition(say=lambda text: None), []
        if state is not None:
            position.load_state_dict(state)
        torch.manual_seed(3)
        made, states = LOADERS[kind](), []
        with engine_of() as engine:
            for _ in range(3):
                for batch in run_batches(engine, engine._meter, made, 1, "off", position):
                    seen.append(batch.tolist())
                    engine.step(engine(batch).sum())
                states.append(through_checkpoint(position.state_dict()))
        return seen, states

    whole, states = thrice(None)
    for num_done in (1, 2, 3):
        assert thrice(states[num_done - 1])[0] == whole[num_done * 6 :]


# --- what cannot be -------------------------------------------------------------------------------

CHANGED = {
    "samples 22, and now it is 23": lambda: DataLoader(Noisy(23), batch_size=4, shuffle=True),
    "batch size 4, and now it is 5": lambda: loader(shuffle=True, batch_size=5),
    "drop_last False, and now it is True": lambda: loader(shuffle=True, drop_last=True),
    "sampler 'RandomSampler', and now it is 'SequentialSampler'": loader,
    "way to read 'by index', and now it is 'from a list'": lambda: [torch.ones(2, 4)] * 6,
}


@pytest.mark.parametrize("change", CHANGED)
def test_data_that_changed_is_named(change: str) -> None:
    first = run(LOADERS["shuffled"], stop=8)
    with pytest.raises(ValueError) as caught:
        run(CHANGED[change], state=first.state)
    assert change in str(caught.value) and "begin_epoch_anew" in str(caught.value)
    rest = run(CHANGED[change], state=first.state, new_epoch=True)
    whole = run(CHANGED[change])
    assert len(rest.seen) == len(whole.seen) // EPOCHS * 2  # the second epoch from its beginning


def test_an_iterable_that_is_read_again_is_said() -> None:
    first = run(LOADERS["stream"], stop=8)
    rest = run(LOADERS["stream"], state=first.state)
    assert len(rest.said) == 1
    assert "2 batches of epoch 1 are read and dropped" in rest.said[0]
    assert run(LOADERS["stream"]).said == []


def test_an_iterator_cannot_be_gone_on_from() -> None:
    def once() -> Iterator[torch.Tensor]:
        return iter([torch.ones(2, 4)] * 5)

    first = run(once, stop=3, epochs=1)
    assert len(first.said) == 1 and "cannot be read again" in first.said[0]
    with pytest.raises(TypeError, match=r"list_iterator cannot be read again from its beginning"):
        run(once, state=first.state, epochs=1)


def test_a_position_is_loaded_before_anything_is_read() -> None:
    position = DataPosition()
    with engine_of() as engine:
        next(run_batches(engine, engine._meter, [torch.ones(2, 4)] * 3, 1, "off", position))
        with pytest.raises(RuntimeError, match="called already"):
            position.load_state_dict(position.state_dict())
    with pytest.raises(ValueError, match="expected what state_dict"):
        DataPosition().load_state_dict({"calls": [{"number": 1}], "num_calls": 1, "seed": 1})


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", (0, 3, 9))
@pytest.mark.parametrize("size", (1, 2, 3, 4, 7))
def test_rounds_go_on_across_epochs(size: int, begin: int) -> None:
    """Against counting: batches of all epochs in one row, dealt out in rounds from `begin` on."""
    lengths = [5, 1, 4, 0, 6]  # an epoch may be shorter than a round
    row = [(epoch, index) for epoch, length in enumerate(lengths) for index in range(length)]
    for rank in range(size):
        cut, taken = Cut(rank, size, begin), []
        for epoch, length in enumerate(lengths):
            found = [index for index in range(length) if cut.takes(index)]
            assert len(found) == cut.num_left(length)
            for index in found:
                # A round ends where the next rank's begins, in numbers of this epoch.
                done = row.index((epoch, index)) - rank + size
                assert cut.taken(index) == done - sum(lengths[:epoch])
            taken += [(epoch, index) for index in found]
            cut.end_epoch(length)
        assert taken == row[begin + rank :: size]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks() as made:
        yield made


def go(
    rank: int, kind: str, state: Any, stop: int, accumulate: int, size: int
) -> tuple[list[Any], Any]:
    """This rank's batches of a run on `size` ranks, and where its data is after `stop` updates."""
    torch.manual_seed(70 + rank)
    position, seen = DataPosition(say=lambda text: None), []
    if state is not None:
        position.load_state_dict(state)
    options = {"share": tw.Share()} if size > 1 else {}
    made = RANK_LOADERS[kind]()
    engine = engine_of(accumulate, **options)
    found = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in run_batches(engine, engine._meter, made, 2, "off", position):
            seen.append(batch.tolist())
            engine.step(engine(batch).sum())
            if engine.num_steps >= stop:
                found = through_checkpoint(position.state_dict())
                break
    engine.close()
    return seen, found


RANK_LOADERS: dict[str, Make] = {
    "shuffled": lambda: loader(shuffle=True, batch_size=2),
    "list": lambda: [torch.full((2, 4), float(index)) for index in range(11)],
    "stream": lambda: DataLoader(NoisyStream(), batch_size=2),
}


def in_rounds(seen: list[list[Any]]) -> list[Any]:
    """The ranks' batches in the order of their rounds."""
    longest = max(map(len, seen))
    return [of[i] for i in range(longest) for of in seen if i < len(of)]


def on(ranks: Ranks, size: int, kind: str, state: Any, stop: int) -> tuple[list[Any], Any]:
    if size == 1:
        seen, state = go(0, kind, state, stop, 1, 1)
        return seen, state
    outcomes = ranks.run(go, kind, state, stop, 1, size, num_ranks=size, timeout_s=120)
    return in_rounds([seen for seen, _ in outcomes]), outcomes[0][1]


@pytest.mark.parametrize("kind", RANK_LOADERS)
def test_the_order_of_all_ranks_together_outlives_their_number(ranks: Ranks, kind: str) -> None:
    """22 batches of two epochs of 11, which no number of ranks divides: 1, 2, 3, 4 ranks and 1."""
    torch.manual_seed(70)
    whole, _ = on(ranks, 1, kind, None, 10_000)
    assert len(whole) == 22
    seen, state = on(ranks, 1, kind, None, 3)
    for size, stop in ((2, 2), (3, 2), (4, 1), (1, 10_000)):
        part, state = on(ranks, size, kind, state, stop)
        seen += part
    assert seen == whole


class PartOfRank(NoisyStream):
    """Shards itself: each rank has samples of its own, and not as many as the other."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (noisy(100 * self.rank + index) for index in range(10 + 4 * self.rank))


def go_with_its_own_loader(
    rank: int, states: list[Any] | None, stop: int
) -> tuple[list[Any], Any, int]:
    position, seen, found = DataPosition(say=lambda text: None), [], None
    if states is not None:
        position.load_state_dict(states[rank])
    engine = engine_of(share=tw.Share())
    made: Any = StatefulDataLoader(PartOfRank(rank), batch_size=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in run_batches(engine, engine._meter, made, 2, "off", position):
            seen.append(batch.tolist())
            engine.step(engine(batch).sum())
            if engine.num_steps == stop:
                found = through_checkpoint(position.state_dict())
                break
    steps = engine.num_steps
    engine.close()
    return seen, found, steps


def test_loaders_that_know_their_place_go_on_rank_by_rank(ranks: Ranks) -> None:
    whole = ranks.run(go_with_its_own_loader, None, 10_000, timeout_s=120)
    assert [len(seen) for seen, _, _ in whole] == [2 * 5, 2 * 7]
    for stop in (3, 6):
        first = ranks.run(go_with_its_own_loader, None, stop, timeout_s=120)
        states = [state for _, state, _ in first]
        rest = ranks.run(go_with_its_own_loader, states, 10_000, timeout_s=120)
        for rank in range(2):
            assert first[rank][0] + rest[rank][0] == whole[rank][0]
    for outcome in ranks.outcomes(go_with_its_own_loader, [states[0]] * 3, 5, num_ranks=3):
        assert outcome.type == "ValueError"
        assert "saved by 2 rank(s) and cannot be divided among 3" in outcome.message


def test_ranks_that_had_finished_do_nothing(ranks: Ranks) -> None:
    """Of 11 batches an epoch, three ranks take 8 rounds, the last of them with one batch alone."""
    _, state = on(ranks, 3, "shuffled", None, 8)
    for seen, steps in ranks.run(go_on_from_the_end, "shuffled", state, num_ranks=3, timeout_s=120):
        assert seen == [] and steps == 0


def go_on_from_the_end(rank: int, kind: str, state: Any) -> tuple[list[Any], int]:
    position = DataPosition(say=lambda text: None)
    position.load_state_dict(state)
    engine = engine_of(share=tw.Share())
    made = RANK_LOADERS[kind]()
    seen = [
        batch.tolist() for batch in run_batches(engine, engine._meter, made, 2, "off", position)
    ]
    steps = engine.num_steps
    engine.close()
    return seen, steps
