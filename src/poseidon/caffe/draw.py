"""Draw a NetParameter as a graph: this writes the DOT text, the program ``dot`` turns it into pictures."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from poseidon import files
from poseidon.caffe.filter import filter_net
from poseidon.caffe.schema import LayerParameter, NetParameter
from poseidon.caffe.schema.messages import ConvolutionParameter, PoolingParameter
from poseidon.errors import ConfigError

_LAYER_STYLE = 'shape=record, style=filled, fillcolor="{colour}"'
_BLOB_STYLE = 'shape=octagon, style=filled, fillcolor="#E0E0E0"'
_COLOURS = {"Convolution": "#FF5050", "Deconvolution": "#FF5050", "Pooling": "#FF9900", "InnerProduct": "#CC33FF"}
_OTHER_COLOUR = "#6495ED"
_LEARNING_TYPES = ("Convolution", "Deconvolution", "InnerProduct")
_TEXT_TYPES = ("dot", "gv")
_DOT_TIMEOUT_S = 120


def draw_net_to_file(
    caffe_net: NetParameter,
    filename: str | os.PathLike[str],
    rankdir: str = "LR",
    phase: int | None = None,
    display_lrm: bool = False,
) -> None:
    """Write a picture in the format of the file's extension; ``.dot`` and ``.gv`` need no other program."""
    ext = Path(filename).suffix.lstrip(".") or "png"
    files.write_bytes(filename, draw_net(caffe_net, rankdir, ext, phase, display_lrm), "picture")


def draw_net(
    caffe_net: NetParameter, rankdir: str = "LR", ext: str = "png", phase: int | None = None, display_lrm: bool = False
) -> bytes:
    """Return the picture's bytes; ``phase`` drops the layers that a net of that phase does not have."""
    text = dot_source(caffe_net, rankdir, phase, display_lrm=display_lrm).encode()
    if ext in _TEXT_TYPES:
        return text
    program = shutil.which("dot")
    if program is None:
        raise ConfigError(
            f"drawing .{ext} needs the program 'dot' of Graphviz, which is not on the PATH; install Graphviz, "
            "or draw to a .dot file"
        )
    done = subprocess.run([program, f"-T{ext}"], input=text, capture_output=True, timeout=_DOT_TIMEOUT_S, check=False)
    if done.returncode:
        raise ConfigError(f"dot could not draw .{ext}: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def dot_source(
    caffe_net: NetParameter,
    rankdir: str = "LR",
    phase: int | None = None,
    label_edges: bool = True,
    display_lrm: bool = False,
) -> str:
    """Return the graph in Graphviz's language."""
    net = caffe_net
    if phase is not None:
        net = NetParameter()
        net.CopyFrom(caffe_net)
        net.state.phase = phase
        net = filter_net(net)
    head = [f"digraph {_quoted(net.name or 'Net')} {{", f"  rankdir={rankdir};"]
    return "\n".join([*head, *_statements(net, rankdir, label_edges, display_lrm), "}", ""])


def _statements(net: NetParameter, rankdir: str, label_edges: bool, display_lrm: bool) -> Iterator[str]:
    blobs: set[str] = set()
    for number, layer in enumerate(net.layer):
        node = f"layer{number}"
        style = _LAYER_STYLE.format(colour=_COLOURS.get(layer.type, _OTHER_COLOUR))
        yield f"  {node} [label={_quoted(get_layer_label(layer, rankdir, display_lrm))}, {style}];"
        for blob in (*layer.bottom, *layer.top):
            if blob not in blobs:
                blobs.add(blob)
                yield f"  {_blob_node(blob)} [label={_quoted(blob)}, {_BLOB_STYLE}];"
        if len(layer.top) == 1 and list(layer.bottom) == list(layer.top):
            yield f"  {_blob_node(layer.top[0])} -> {node} [dir=both];"
            continue
        for blob in layer.bottom:
            yield f"  {_blob_node(blob)} -> {node};"
        edge = f" [label={_quoted(get_edge_label(layer))}]" if label_edges and get_edge_label(layer) else ""
        for blob in layer.top:
            yield f"  {node} -> {_blob_node(blob)}{edge};"


def get_layer_label(layer: LayerParameter, rankdir: str = "LR", display_lrm: bool = False) -> str:
    """Return the label of a layer's box: name, type and, for sliding windows, kernel, stride and padding."""
    parts = [layer.name, f"({layer.type})"]
    windows = layer.pooling_param if layer.type == "Pooling" else layer.convolution_param
    if isinstance(windows, PoolingParameter):
        parts[1] = f"({PoolingParameter.PoolMethod.Name(windows.pool)} {layer.type})"
    if layer.type in ("Convolution", "Deconvolution", "Pooling"):
        parts += [f"{what}: {_sizes(windows, what)}" for what in ("kernel size", "stride", "pad")]
    if display_lrm and layer.type in _LEARNING_TYPES:
        parts.append("lr mult: " + (", ".join(f"{param.lr_mult:g}" for param in layer.param) or "1"))
    # In top-to-bottom graphs boxes grow sideways, in left-to-right graphs downwards.
    return (" " if rankdir in ("TB", "BT") else "\n").join(parts)


def get_edge_label(layer: LayerParameter) -> str:
    """Return the label of the arrow that leaves a layer: its number of outputs."""
    if layer.type == "Data":
        return f"Batch {layer.data_param.batch_size}"
    if layer.type in ("Convolution", "Deconvolution"):
        return str(layer.convolution_param.num_output)
    if layer.type == "InnerProduct":
        return str(layer.inner_product_param.num_output)
    return ""


def _sizes(settings: ConvolutionParameter | PoolingParameter, what: str) -> str:
    """Return a window's setting as Caffe resolves it: by height and width if given, else for all axes."""
    field = what.replace(" ", "_")
    short = field.removesuffix("_size")
    if settings.HasField(f"{short}_h") or settings.HasField(f"{short}_w"):
        return f"{getattr(settings, f'{short}_h')} x {getattr(settings, f'{short}_w')}"
    value = getattr(settings, field)
    if isinstance(value, int):
        return str(value)
    return " x ".join(map(str, value)) or ("1" if what == "stride" else "0")


def _blob_node(name: str) -> str:
    return _quoted(f"blob {name}")


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
