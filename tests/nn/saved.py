"""What a forward pass keeps for its backward pass."""

import torch


def saved_tensors(function, x):
    """The tensors saved while `function(x)` is computed, one for each piece of memory."""
    found = {}

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function(x)
    return result, list(found.values())


def saved_bytes(function, x):
    """How many bytes are kept besides the input and the output, which others keep anyway."""
    result, tensors = saved_tensors(function, x)
    known = {t.untyped_storage().data_ptr() for t in (x, result)}
    return sum(
        t.untyped_storage().nbytes() for t in tensors if t.untyped_storage().data_ptr() not in known
    )


def gradient(function, x, cotangent):
    """The gradient of a leaf that has the values and the layout of `x`."""
    leaf = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    function(leaf).backward(cotangent)
    return leaf.grad
