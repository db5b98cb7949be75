# The wheel of torchvision on PyPI is built for CUDA; without CUDA its operators are missing and it does not import.
# Two of them are declared here, without code: nobody calls them.
import torch

if not hasattr(torch.ops.torchvision, "nms"):
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
