"""`Schedule`: writes a curve's values into an option of the param groups, on the host or on the
device. The schedules that users name are in `schedules`."""

from __future__ import annotations

from dataclasses import asdict
from numbers import Real
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer

from tradewind.optim.curves import Curve, check_count


class _Clock:
    """The step count on one device and the factor at it. Moving it asks the host for nothing.

    The factors are a table, so that any curve takes three small kernels and its float64 values are
    the host's own, whatever the device's cosine rounds to. 8 bytes per step of the schedule.
    """

    def __init__(self, factors: torch.Tensor, device: torch.device) -> None:
        self.factors = factors.to(device)
        self.step = torch.full((1,), -1, dtype=torch.int64, device=device)
        self._index = torch.empty_like(self.step)
        self.factor = torch.empty(1, dtype=torch.float64, device=device)

    def move(self, to: int | None) -> None:
        if to is None:
            self.step.add_(1)
        else:
            self.step.fill_(to)
        torch.clamp(self.step, 0, self.factors.numel() - 1, out=self._index)
        torch.index_select(self.factors, 0, self._index, out=self.factor)


class Schedule(LRScheduler):
    """Writes base * curve(step) into `option` of every param group; base is the group's value when
    its first schedule was made, kept in the group as ``initial_<option>``, as torch keeps
    ``initial_lr``. The named schedules document the arguments."""

    def __init__(
        self,
        optimizer: Optimizer,
        curve: Curve,
        *,
        option: str = "lr",
        last_epoch: int = -1,
        capturable: bool | None = None,
    ) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: expected an Optimizer, got {type(optimizer).__name__}")
        last_epoch = check_count("last_epoch", last_epoch, -1, None, "-1 starts a schedule")
        self.option, self.curve = option, curve
        self._tensors: list[torch.Tensor] = []  # one per group where the device keeps the count
        self._clocks: dict[torch.device, _Clock] = {}
        groups = optimizer.param_groups
        for index, group in enumerate(groups):
            _check_group(index, group, option, needs_initial=last_epoch >= 0)
        on_device = _is_for_device(groups, option, capturable)
        for group in groups:
            value = group[option]
            group.setdefault(
                self._initial, value.clone() if isinstance(value, torch.Tensor) else value
            )
        if on_device:
            self._move_to_device(groups)
        # torch's constructor wants initial_lr; the schedule of another option leaves none behind.
        borrowed = [group for group in groups if "initial_lr" not in group]
        for group in borrowed:
            group["initial_lr"] = group.get("lr")
        super().__init__(optimizer, last_epoch)
        for group in borrowed:
            del group["initial_lr"]

    @property
    def _initial(self) -> str:
        return f"initial_{self.option}"

    @property
    def last_epoch(self) -> int:
        """Steps taken. With the count on the device, asking waits for the device."""
        for clock in self._clocks.values():
            return int(clock.step.item())
        return self._host_epoch

    @last_epoch.setter
    def last_epoch(self, value: int) -> None:
        self._host_epoch = value
        for clock in self._clocks.values():
            clock.step.fill_(value)

    def _initial_step(self) -> None:
        self.base_lrs = [float(group[self._initial]) for group in self.optimizer.param_groups]
        super()._initial_step()

    def _move_to_device(self, groups: list[dict[str, Any]]) -> None:
        steps = range(self.curve.total_steps + 1)
        factors = torch.tensor([self.curve(step) for step in steps], dtype=torch.float64)
        for group in groups:
            if not isinstance(group[self.option], torch.Tensor):
                device = group["params"][0].device if group["params"] else None
                group[self.option] = torch.tensor(
                    float(group[self.option]), dtype=torch.float32, device=device
                )
            tensor: torch.Tensor = group[self.option]
            self._tensors.append(tensor)
            if tensor.device not in self._clocks:
                self._clocks[tensor.device] = _Clock(factors, tensor.device)

    # torch's step() and SequentialLR call this one.
    def _update_lr(self, epoch: int | None = None) -> None:
        self._check_number_of_groups(len(self.base_lrs), "when the schedule was made")
        if self._clocks:
            self._update_on_device(epoch)
            return
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        self._write(self.get_lr())

    @torch.no_grad()
    def _update_on_device(self, epoch: int | None) -> None:
        for clock in self._clocks.values():
            clock.move(epoch)
        for group, tensor, base in zip(
            self.optimizer.param_groups, self._tensors, self.base_lrs, strict=True
        ):
            # optimizer.load_state_dict() puts copies in; a captured graph knows only the first.
            group[self.option] = tensor
            factor = self._clocks[tensor.device].factor
            torch.mul(factor.view(tensor.shape), base, out=tensor)

    @torch.no_grad()
    def _write(self, values: list[float | torch.Tensor]) -> None:
        for index, (group, value) in enumerate(
            zip(self.optimizer.param_groups, values, strict=True)
        ):
            if self._tensors:
                group[self.option] = self._tensors[index]
            if isinstance(group[self.option], torch.Tensor):
                group[self.option].fill_(value)
            else:
                group[self.option] = value
        self._last_lr = values

    def get_lr(self) -> list[float | torch.Tensor]:
        """The values at `last_epoch`, one per group, whatever the groups hold now."""
        factor = self.curve(self.last_epoch)
        return [base * factor for base in self.base_lrs]

    def get_last_lr(self) -> list[float | torch.Tensor]:
        """The values of `option` last written, one per group: floats, or copies of the tensors."""
        return [tensor.clone() for tensor in self._tensors] if self._tensors else self._last_lr

    get_last_value = get_last_lr

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and strings. With the count on the device, waits for the device.

        ``values`` are those the groups hold now: with several schedules on one option
        (SequentialLR), loading any of them then restores what was in force.
        """
        return {
            "plan": self._plan(),
            "last_epoch": self.last_epoch,
            "_step_count": self._step_count,
            "base_lrs": list(self.base_lrs),
            "values": [float(group[self.option]) for group in self.optimizer.param_groups],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where `state_dict` was taken: count, bases and the groups' present values.

        Raises ValueError, with nothing changed, where the state is of another plan (other steps,
        curve or option) or of another number of groups.
        """
        saved, plan = state_dict.get("plan"), self._plan()
        if not isinstance(saved, dict):
            raise ValueError(
                f"state dict: expected one of {type(self).__name__}.state_dict(), got keys "
                f"{sorted(state_dict)}; load it into a scheduler of the class that saved it"
            )
        other = [
            f"{key} {value!r}, got {saved.get(key)!r}"
            for key, value in plan.items()
            if saved.get(key) != value
        ]
        if other:
            raise ValueError(
                f"state dict: expected {'; '.join(other)}; make the schedule with the saved values "
                f"to continue it, or with last_epoch={state_dict['last_epoch'] - 1} to change the "
                "plan from here on"
            )
        self._check_number_of_groups(len(state_dict["values"]), "in the state dict")
        self.base_lrs = list(state_dict["base_lrs"])
        self.last_epoch = state_dict["last_epoch"]
        self._step_count = state_dict["_step_count"]
        self._write(list(state_dict["values"]))

    def _plan(self) -> dict[str, Any]:
        return {"option": self.option, **asdict(self.curve)}

    def _check_number_of_groups(self, expected: int, when: str) -> None:
        now = len(self.optimizer.param_groups)
        if now != expected:
            raise ValueError(
                f"param groups: expected {expected}, as {when}, got {now}; add all groups to the "
                "optimizer before the schedule is made"
            )


def _check_group(index: int, group: dict[str, Any], option: str, *, needs_initial: bool) -> None:
    if not _is_number(group.get(option)):
        names = [k for k in group if _is_number(group[k]) and not k.startswith("initial_")]
        raise ValueError(
            f"option: expected a numeric option of param group {index} ({', '.join(names)}), got "
            f"{option!r}, which is {group.get(option)!r} there"
        )
    if needs_initial and f"initial_{option}" not in group:
        raise ValueError(
            f"last_epoch: expected initial_{option} in param group {index}, as a schedule leaves "
            "it, got none; load the optimizer's state dict first, or start with last_epoch=-1"
        )


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and value.is_floating_point()
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_for_device(groups: list[dict[str, Any]], option: str, capturable: bool | None) -> bool:
    are_tensors = [isinstance(group[option], torch.Tensor) for group in groups]
    if capturable is None:
        if any(are_tensors) and not all(are_tensors):
            raise ValueError(
                f"{option}: expected tensors in all param groups or in none, got both; give "
                "capturable=True to make all of them tensors, or capturable=False to keep them"
            )
        return any(are_tensors)
    for index, group in enumerate(groups):
        value, parameters = group[option], group["params"]
        if capturable and isinstance(value, torch.Tensor) and parameters:
            device = parameters[0].device
            if value.device != device:
                raise ValueError(
                    f"{option}: expected a tensor on {device}, as the parameters of group {index}, "
                    f"got one on {value.device}; move it there, or give a float"
                )
    return bool(capturable)
