"""A model whose parameters live in arenas. The module, its parameter objects and their names stay
what they were; only their memory moves. What cannot move is refused by name, beforehand."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, MutableMapping

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.weak import WeakIdKeyDictionary

from tradewind._core import native

# Parameter -> weak reference to the AdoptedModel that holds it: an Engine that was dropped without
# close() holds nothing.
_adopted: MutableMapping[torch.Tensor, weakref.ref[AdoptedModel]] = WeakIdKeyDictionary()


def clean_name(name: str) -> str:
    """The name a parameter has without `torch.compile`'s wrapper."""
    return name.replace("_orig_mod.", "")


class AdoptedModel:
    """Adopts all parameters of `model`, or raises and leaves it as it was.

    Raises:
        TypeError: a parameter that is lazy, meta, sparse, quantized, a DTensor or another subclass,
            or of a dtype that no arena holds.
        ValueError: no parameters, parameters on several devices, in another Engine, overlapping in
            memory or not dense.
        NotImplementedError: parameters that are neither on the CPU nor on CUDA.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = named_parameters(model)
        for name, parameter in named:
            check_adoptable(name, parameter)
        _check_devices(named)
        self.model = model
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.arena = native.ParameterArena(list(self.parameters), self.names)
        self._sites = _find_sites(model)
        self._noted: set[str] = set()
        # Before anything but a sweep writes parameters: somebody may be reading them.
        self.before_writing: Callable[[], None] = _nothing
        for parameter in self.parameters:
            _adopted[parameter] = weakref.ref(self)

    def release(self) -> None:
        """Let another Engine adopt these parameters. Their memory stays where it is."""
        for parameter in self.parameters:
            if parameter in _adopted:
                del _adopted[parameter]

    def bring_home(self) -> None:
        """Put back what left the arena since the last step: replaced objects and replaced memory.

        Raises RuntimeError, before any change, where a dtype, device or shape is another one now.
        """
        replaced = [site for site in self._sites if site[0].get(site[1]) is not site[2]]
        for holder, key, parameter, name in replaced:
            _check_replacement(name, parameter, holder.get(key))
        if replaced:
            self.before_writing()
        for holder, key, parameter, _ in replaced:
            newcomer = holder[key]
            assert newcomer is not None
            with torch.no_grad():
                parameter.copy_(newcomer)
            parameter.requires_grad_(newcomer.requires_grad)
            if newcomer.grad is not None:
                parameter.grad = newcomer.grad
            # Whoever kept the new object sees the same memory.
            newcomer.data = parameter.data
            holder[key] = parameter
        self._note([name for *_, name in replaced], "replaced (load_state_dict(assign=True)?)")
        strayed = [self.names[index] for index in self.arena.bring_home()]
        self._note(strayed, "given other memory (.data = or .to()?)")

    def _note(self, names: list[str], event: str) -> None:
        fresh = [name for name in names if name not in self._noted]
        if fresh:
            self._noted.update(fresh)
            shown = ", ".join(fresh[:3]) + (f" and {len(fresh) - 3} more" if len(fresh) > 3 else "")
            warnings.warn(
                f"parameters were {event}: {shown}. Their values were copied back into the arena; "
                "change a model before it is given to the Engine, or in place.",
                stacklevel=5,
            )


def _nothing() -> None: ...


Site = tuple[dict[str, "torch.nn.Parameter | None"], str, torch.nn.Parameter, str]


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """(name, parameter) of each distinct parameter in registration order."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    named = [(clean_name(name), parameter) for name, parameter in model.named_parameters()]
    if not named:
        raise ValueError("model: expected at least one parameter, got none; nothing to train")
    return named


def check_adoptable(name: str, parameter: torch.Tensor) -> None:
    kind = _refused_kind(parameter)
    if kind:
        raise TypeError(f"parameter {name!r}: expected a plain dense nn.Parameter, got {kind}")
    holder = _adopted.get(parameter)
    if holder is not None and holder() is not None:
        raise ValueError(
            f"parameter {name!r}: is in another Engine already; close() that one first, or copy "
            "the module"
        )


def _refused_kind(parameter: torch.Tensor) -> str:
    if torch.nn.parameter.is_lazy(parameter):
        return "a lazy one without a shape; run one batch through the model first"
    if parameter.is_meta:
        return "one on the meta device without values; materialize the model first (to_empty)"
    if type(parameter).__name__ == "FlatParameter" or hasattr(parameter, "_is_flat_param"):
        return "FSDP's flat parameter; give the Engine the unwrapped model"
    if torch.nn.Parameter not in type(parameter).__mro__ or is_traceable_wrapper_subclass(
        parameter
    ):
        return (
            f"a {type(parameter).__name__} (a tensor subclass); give the Engine the model before "
            "it is distributed or quantized"
        )
    if parameter.is_nested:
        return "a nested one; leave it out of the model that is trained"
    if parameter.is_quantized:
        return "a quantized one; dequantize it"
    if parameter.layout != torch.strided:
        return f"one of layout {parameter.layout}; call .to_dense() on it"
    return ""


def _check_devices(named: list[tuple[str, torch.nn.Parameter]]) -> None:
    first_name, first = named[0]
    for name, parameter in named:
        if parameter.device != first.device:
            raise ValueError(
                f"parameter {name!r}: is on {parameter.device}, but {first_name!r} is on "
                f"{first.device}; expected one device: call model.to(device) first"
            )
    if first.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"Engine on {first.device.type} is not built; expected the model on the CPU or on CUDA"
        )


def _find_sites(model: torch.nn.Module) -> list[Site]:
    """Every place in the module tree that holds a parameter, tied ones several times."""
    return [
        (module._parameters, key, parameter, clean_name(f"{path}.{key}" if path else key))
        for path, module in model.named_modules()
        for key, parameter in module._parameters.items()
        if parameter is not None
    ]


def _check_replacement(
    name: str, parameter: torch.nn.Parameter, newcomer: torch.nn.Parameter | None
) -> None:
    if newcomer is None:
        raise RuntimeError(
            f"parameter {name!r}: was removed from the model; close this Engine and make another "
            "one for the changed model"
        )
    same = (
        newcomer.dtype == parameter.dtype
        and newcomer.shape == parameter.shape
        and newcomer.device == parameter.device
    )
    if not same or _refused_kind(newcomer):
        raise RuntimeError(
            f"parameter {name!r}: the Engine adopted {parameter.dtype} {tuple(parameter.shape)} on "
            f"{parameter.device}, found {newcomer.dtype} {tuple(newcomer.shape)} on "
            f"{newcomer.device} in its place; load or convert the model before it is given to the "
            "Engine"
        )
