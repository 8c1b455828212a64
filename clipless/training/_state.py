"""Training state as plain files: a tree of data becomes JSON and named tensors, and back.

Nothing here is pickled. What JSON cannot hold and is no tensor is refused when it is saved.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

_MARKS = ("tensor", "tuple", "items")


def to_files(tree: Any, *, name: str) -> dict[str, bytes]:
    """Return the files `name.json` and, if there are tensors, `name.safetensors`.

    Example:
        >>> files = to_files({"step": 3, "moments": (torch.ones(2), None)}, name="state")
        >>> sorted(files)
        ['state.json', 'state.safetensors']
        >>> from_files(files, name="state")
        {'step': 3, 'moments': (tensor([1., 1.]), None)}
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_flatten(tree, tensors, name), indent=1)
    files = {f"{name}.json": text.encode()}
    if tensors:
        files[f"{name}.safetensors"] = tensors_to_bytes(tensors)
    return files


def from_files(files: Mapping[str, bytes], *, name: str) -> Any:
    """Return the tree that `to_files` was given; its tensors are on the CPU."""
    data = files.get(f"{name}.safetensors")
    tensors = {} if data is None else safetensors.torch.load(data)
    return _restore(json.loads(files[f"{name}.json"]), tensors)


def tensors_to_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return tensors in the safetensors format. Shared ones are written once for each name."""
    return safetensors.torch.save(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    )


def _flatten(tree: Any, tensors: dict[str, Tensor], path: str) -> Any:
    if isinstance(tree, Tensor):
        tensors[path] = tree
        return {"tensor": path}
    if isinstance(tree, Mapping):
        if all(isinstance(key, str) for key in tree) and not set(tree) & set(_MARKS):
            return {key: _flatten(value, tensors, f"{path}.{key}") for key, value in tree.items()}
        pairs = [
            [_flatten(key, tensors, f"{path}.key"), _flatten(value, tensors, f"{path}.{key}")]
            for key, value in tree.items()
        ]
        return {"items": pairs}
    if isinstance(tree, list | tuple):
        parts = [_flatten(value, tensors, f"{path}.{i}") for i, value in enumerate(tree)]
        return {"tuple": parts} if isinstance(tree, tuple) else parts
    if isinstance(tree, np.generic):
        return tree.item()
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise TypeError(
        f"{path} is a {type(tree).__name__}, which a checkpoint cannot hold: it keeps numbers, "
        "text, tensors, and lists, tuples and dictionaries of them."
    )


def _restore(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_restore(value, tensors) for value in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"tensor": str(path), **rest} if not rest:
            return tensors[path]
        case {"tuple": parts, **rest} if not rest:
            return tuple(_restore(value, tensors) for value in parts)
        case {"items": pairs, **rest} if not rest:
            return {_restore(key, tensors): _restore(value, tensors) for key, value in pairs}
    return {key: _restore(value, tensors) for key, value in tree.items()}


def generator_states() -> dict[str, Any]:
    """Return the states of the global generators, which dropout and augmentation draw from."""
    numpy_state = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "python": random.getstate(),
        "numpy": (numpy_state[0], numpy_state[1].tolist(), *numpy_state[2:]),  # type: ignore[index]
    }


def restore_generators(states: Mapping[str, Any]) -> None:
    """Set the global generators to what `generator_states` returned."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])
    random.setstate(states["python"])
    name, words, *rest = states["numpy"]
    np.random.set_state((name, np.array(words, dtype=np.uint32), *rest))
