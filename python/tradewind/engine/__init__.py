"""The Engine: one object that trains a model. It composes the engine rooms; they do not know it."""

from tradewind.engine.engine import Engine
from tradewind.engine.step_result import StepResult

__all__ = ["Engine", "StepResult"]
