"""Sharing gradients between ranks."""

from tradewind._core import native
from tradewind.share.gradient_sharing import GradientSharing
from tradewind.share.options import Share

SharingError: type[RuntimeError] = native.SharingError

__all__ = ["GradientSharing", "Share", "SharingError"]
