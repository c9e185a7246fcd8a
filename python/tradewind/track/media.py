"""What can be logged beside numbers and text: pictures and distributions.

Host data is copied when the object is made, so that the caller may reuse its buffer; data on a
device is cloned there and fetched when the run is flushed, without a sync in the training loop.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_CHANNELS = (1, 3, 4)
_RANGE_SLACK = 1e-3  # rounding of a picture that was normalised and back
NUM_HISTOGRAM_BINS = 64


class Image:
    """A picture to log: an array or tensor of shape HW, CHW or HWC, uint8 or float in [0, 1], or a
    PIL image. `layout` ("auto", "CHW", "HWC") settles what the shape leaves open; "auto" takes
    tensors as CHW and arrays as HWC where both fit."""

    def __init__(self, picture: Any, *, layout: str = "auto") -> None:
        """Raises TypeError for another kind of data, ValueError for another shape or range."""
        if layout not in ("auto", "CHW", "HWC"):
            raise ValueError(f"Image: layout: expected 'auto', 'CHW' or 'HWC', got {layout!r}")
        if hasattr(picture, "convert") and hasattr(picture, "getbands"):
            picture, layout = _from_pil(picture), "HWC"
        shape = tuple(int(size) for size in getattr(picture, "shape", ()))
        self._is_channels_first = _is_channels_first(
            shape, layout, prefer=hasattr(picture, "detach"), kind=type(picture).__name__
        )
        self._data, self._is_fetched = _captured(picture, "Image")
        if self._is_fetched:
            _check_pixels(self._data)
        self.num_bytes = _num_bytes(self._data)

    def pixels(self) -> NDArray[np.uint8]:
        """Pixels as HWC, uint8; fetches from the device the first time."""
        import numpy as np

        array = _fetched(self._data)
        if array.ndim == 2:
            array = array[:, :, None]
        elif self._is_channels_first:
            array = array.transpose(1, 2, 0)
        if array.dtype != np.uint8:
            scaled = np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=1.0, neginf=0.0)
            array = np.rint(np.clip(scaled, 0.0, 1.0) * 255.0).astype(np.uint8)
        pixels: NDArray[np.uint8] = np.ascontiguousarray(array, dtype=np.uint8)
        self._data, self._is_channels_first = pixels, False
        return pixels

    def png(self) -> bytes:
        """The picture as a PNG file."""
        import PIL.Image

        pixels = self.pixels()
        buffer = io.BytesIO()
        PIL.Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).save(
            buffer, format="PNG"
        )
        return buffer.getvalue()


class Histogram:
    """A distribution to log: all elements of an array or tensor of numbers, of any shape. Values
    that are not finite are counted apart."""

    def __init__(self, values: Any) -> None:
        """Raises TypeError for data that is not an array, a tensor or a sequence of numbers."""
        if not hasattr(values, "detach"):
            values = _as_array(values, "Histogram")
        data, is_fetched = _captured(values, "Histogram")
        self.num_bytes = _num_bytes(data)
        self._data: Any = data
        self._counted: tuple[list[float], list[int], int] | None = None
        if is_fetched:
            self.counted()

    def counted(self) -> tuple[list[float], list[int], int]:
        """Edges (one more than counts), counts, and the number of non-finite values."""
        if self._counted is None:
            self._counted = _count(_fetched(self._data))
            self._data, self.num_bytes = None, 1024
        return self._counted


def _count(array: NDArray[Any]) -> tuple[list[float], list[int], int]:
    import numpy as np

    flat = array.astype(np.float64).ravel()
    finite = flat[np.isfinite(flat)]
    num_non_finite = int(flat.size - finite.size)
    if finite.size == 0:
        return [], [], num_non_finite
    low, high = float(finite.min()), float(finite.max())
    one_bin = [low, high], [int(finite.size)], num_non_finite
    scale = 1.0 if np.isfinite(high - low) else 0.5  # so that the range does not overflow
    try:
        counts, edges = np.histogram(
            finite * scale, NUM_HISTOGRAM_BINS, (low * scale, high * scale)
        )
    except ValueError:  # the range is too narrow to hold that many distinct edges
        return one_bin
    inner = [float(edge) / scale for edge in edges[1:-1]]
    if low == high or not np.all(np.diff([low, *inner, high]) > 0):
        return one_bin
    return [low, *inner, high], [int(count) for count in counts], num_non_finite


def _is_channels_first(shape: tuple[int, ...], layout: str, *, prefer: bool, kind: str) -> bool:
    first = len(shape) == 3 and shape[0] in _CHANNELS and layout != "HWC"
    last = len(shape) == 3 and shape[2] in _CHANNELS and layout != "CHW"
    if 0 in shape or not (len(shape) == 2 or first or last):
        raise ValueError(
            f"Image: expected shape HW, CHW or HWC with 1, 3 or 4 channels (layout "
            f"{layout!r}), got {list(shape)} from a {kind}; log one picture at a time, or index "
            "the batch"
        )
    return first and (prefer or not last)


def _from_pil(picture: Any) -> NDArray[Any]:
    import numpy as np

    if picture.mode not in ("L", "RGB", "RGBA"):
        picture = picture.convert("RGBA" if "A" in picture.getbands() else "RGB")
    array = np.array(picture)
    return array[:, :, None] if array.ndim == 2 else array


def _captured(data: Any, wrapper: str) -> tuple[Any, bool]:
    """A copy of `data`, and whether it is a host array (else a tensor still on its device)."""
    if not hasattr(data, "detach"):
        return _as_array(data, wrapper), True
    if data.is_complex():
        raise TypeError(f"{wrapper}: expected real numbers, got a tensor of {data.dtype}")
    if data.device.type == "cpu":
        return _fetched(data).copy(), True
    return data.detach().clone(), False


def _as_array(data: Any, wrapper: str) -> NDArray[Any]:
    import numpy as np

    try:
        array = np.array(data)
    except (ValueError, TypeError):
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{wrapper}: expected an array or tensor of real numbers, got {type(data).__name__}"
            f" of {array.dtype}; convert it first"
        )
    return array


def _fetched(data: Any) -> NDArray[Any]:
    if not hasattr(data, "detach"):
        array: NDArray[Any] = data
        return array
    tensor = data.detach().cpu()
    if tensor.is_floating_point():
        tensor = tensor.double()  # numpy has no bfloat16 or 8-bit floats
    fetched: NDArray[Any] = tensor.numpy()
    return fetched


def _check_pixels(array: NDArray[Any]) -> None:
    import numpy as np

    if array.dtype == np.uint8 or array.dtype.kind == "b":
        return
    if array.dtype.kind != "f":
        raise TypeError(
            f"Image: expected uint8 or floats in [0, 1], got {array.dtype}; use .astype('uint8')"
        )
    low, high = float(np.nanmin(array)), float(np.nanmax(array))
    if low < -_RANGE_SLACK or high > 1 + _RANGE_SLACK:
        raise ValueError(
            f"Image: expected floats in [0, 1], got values from {low:g} to {high:g}; divide by "
            "255, or undo the normalisation"
        )


def _num_bytes(data: Any) -> int:
    size: int = data.nbytes if hasattr(data, "nbytes") else data.numel() * data.element_size()
    return size
