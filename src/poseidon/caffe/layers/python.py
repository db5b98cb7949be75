"""Python layers: a user's class, named in the prototxt by module and class."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Sequence
from typing import Any

from poseidon.caffe import as_caffe
from poseidon.caffe.blob import BlobVec
from poseidon.caffe.layers.base import Blobs, Count, Layer
from poseidon.caffe.layers.registry import register
from poseidon.caffe.schema import LayerParameter


class PythonLayer:
    """Base of users' layers, ``caffe.Layer``: override ``setup``, ``reshape``, ``forward`` and ``backward``.

    Blobs are read and written through their live arrays ``data`` and ``diff``. ``param_str`` is the text from the
    prototxt, ``phase`` the net's phase, and ``blobs`` the parameters (``self.blobs.add_blob(3, 4)`` adds one).
    """

    param_str: str
    phase: int
    blobs: BlobVec
    type = "Python"

    def __init__(self, param: LayerParameter) -> None:
        """``param`` is the LayerParameter; the attributes above exist from ``setup`` on."""


@register("Python")
class Python(Layer):
    """Runs a user's layer and delegates unknown attributes to it."""

    bottom_count = Count(0, None)
    top_count = Count(0, None)

    def __init__(self, param: LayerParameter) -> None:
        super().__init__(param)
        self.user: Any = self._user_class()(param)
        """The instance of the user's class."""
        self.user.param_str = param.python_param.param_str
        self.user.phase = param.phase
        self.user.blobs = self.blobs

    def __getattr__(self, name: str) -> Any:
        # Scripts call their own methods through the net: net.layers[0].set_database(...).
        if name == "user":
            raise AttributeError(name)
        return getattr(self.user, name)

    def setup(self, bottoms: Blobs, tops: Blobs) -> None:
        self.user.setup(bottoms, tops)

    def reshape(self, bottoms: Blobs, tops: Blobs) -> None:
        self.user.reshape(bottoms, tops)

    def prepare(self, bottoms: Blobs, tops: Blobs) -> None:
        """Reshape before every pass: a user's layer may shape its tops by its data."""
        before = [top.shape for top in tops]
        self.reshape(bottoms, tops)
        if before != [top.shape for top in tops]:
            self._fill_loss_weights(tops)

    def forward(self, bottoms: Blobs, tops: Blobs) -> None:
        self.user.forward(bottoms, tops)

    def backward(self, tops: Blobs, propagate_down: Sequence[bool], bottoms: Blobs) -> None:
        self.user.backward(tops, list(propagate_down), bottoms)

    def _user_class(self) -> Any:
        settings = self.param.python_param
        if "caffe" not in sys.modules:
            # The user's module runs "import caffe", which must import this package, whose Layer it subclasses.
            as_caffe.install()
        try:
            module = importlib.import_module(settings.module)
        except ModuleNotFoundError as error:
            raise self.error(
                f"module {settings.module!r} cannot be imported ({error}); is its folder on PYTHONPATH?"
            ) from error
        found = getattr(module, settings.layer, None)
        if inspect.isclass(found) and issubclass(found, PythonLayer):
            return found
        usable = sorted(name for name, value in vars(module).items() if _is_layer(value))
        if found is not None:
            raise self.error(
                f"{settings.module}.{settings.layer} does not derive from poseidon.caffe.Layer; if it runs "
                "`import caffe`, another Caffe was imported first (see poseidon.caffe.as_caffe)"
            )
        raise self.error(
            f"module {settings.module!r} has no class {settings.layer!r}; its layers: {', '.join(usable) or 'none'}"
        )


def _is_layer(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, PythonLayer) and value is not PythonLayer
