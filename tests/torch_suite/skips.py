"""Where PyTorch's suite and ours part on purpose. `run.py --write-docs` publishes these tables."""

from __future__ import annotations

from dataclasses import dataclass

# Patterns of test names (fnmatch) that do not run, and why.
SKIPS = {
    "test_rosenbrock_sparse_*": (
        "Sparse gradients are refused by name (`RuntimeError`): the step is one pass over dense "
        "memory."
    ),
    "test_fused_error_on_params_on_meta_*": (
        "Asks for torch's message about `fused=True`, which chooses nothing here, then steps over "
        "meta parameters, which torch does in vain; ours refuses them by name (`TypeError`)."
    ),
    "test_complex_2d_LAMB_*": (
        "Expects a complex parameter to move as its real and imaginary parts do when they are two "
        "parameters; LAMB scales each parameter by its own norm, and a complex one has one norm."
    ),
    "test_step_iteration_*": "Tests `torch.optim.LBFGS` alone.",
}

# Flags of the constructors that the suite never sets to True here, and why.
UNSUPPORTED_FLAGS = {
    "differentiable": "The native pass records no graph; True raises `NotImplementedError`.",
}


@dataclass(frozen=True)
class Raised:
    """What ours raises; `instead` is the type where it is not torch's."""

    message: str
    why: str = "The same type of error, in our own words."
    instead: type[Exception] | None = None


@dataclass(frozen=True)
class Accepted:
    why: str


# Bad arguments of `test_errors` that do not get torch's message, by torch's description.
ERRORS: dict[str, Raised | Accepted] = {
    "Tensor lr must be 1-element": Raised(r"lr: expected a tensor of one element"),
    "beta1 should be between 0 and 1": Raised(r"betas\[0\]: expected a number in \[0, 1\)"),
    "weight_decay should > 0": Raised(r"weight_decay: expected a number >= 0"),
    "momentum should be between 0 and 1": Raised(r"momentum: expected a number >= 0"),
    "lr_decay must be bigger than 0": Raised(r"lr_decay: expected a number >= 0"),
    "a param group cannot have duplicate parameters": Raised(
        "a parameter group with duplicate parameters",
        "`ValueError` where torch warns: one pass would update the parameter twice.",
        ValueError,
    ),
    "does not support complex parameters": Raised(
        "expects a real matrix", "`ValueError`, as for any other shape.", ValueError
    ),
    "lr as Tensor doesn't work with foreach & not capturable": Accepted(
        "Accepted: `foreach` chooses nothing here."
    ),
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": Accepted(
        "Accepted: `foreach` chooses nothing here."
    ),
    "betas must be either both floats or both Tensors": Accepted(
        "Accepted: each beta is read as a number."
    ),
}
