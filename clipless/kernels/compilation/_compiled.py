"""`CompiledFunction`: torch.compile with our settings, and the plain function where it fails."""

from __future__ import annotations

import itertools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from clipless.errors import PrivacyError
from clipless.kernels.layers._compiler_operators import as_operators, join_sorted_norms

AnyFunction = Callable[..., Any]


class CompiledFunction:
    """A function of tensors, compiled at its first call, or as it is if that is not possible.

    `attempt(function, *arguments)` is called at first with the compiled function: what it raises is
    taken for the compiler's fault, and there will be no further attempt. With `fixed`, batches have
    one of a few sizes: each is compiled for by itself and attempted when it comes for the first
    time (`together`: one function is compiled for all of them but the first). A `pure` function
    may not write to tensors: its bounds are computed before, of values that would be gone by then.
    With `rounds`, numbers may be rounded to bfloat16 on the way, and must be where eager code does.
    """

    def __init__(
        self,
        function: AnyFunction,
        *,
        name: str,
        attempt: AnyFunction,
        backend: str,
        fixed: bool,
        together: bool = False,
        mode: str | None = None,
        joined: bool = False,
        pure: bool = False,
        rounds: bool = False,
    ) -> None:
        self.plain, self._name, self._attempt = function, name, attempt
        self._backend, self._mode, self._fixed, self._joined = backend, mode, fixed, joined
        self._pure, self._together, self._rounds = pure, together, rounds
        self._function: AnyFunction | None = None
        self._attempted: set[int] = set()
        """The sizes of batches that were attempted."""

    @property
    def works(self) -> bool:
        """Whether the compiled function is the one that is called."""
        return self._function is not self.plain

    def __call__(self, *arguments: Any) -> Any:
        """Call the function."""
        with as_operators(self._joined):
            return self._call(*arguments)

    def _call(self, *arguments: Any) -> Any:
        if self._function is None:
            backend = _backend(
                self._backend, mode=self._mode, joined=self._joined, pure=self._pure,
                rounds=self._rounds,
            )  # fmt: skip
            self._function = torch.compile(
                _with_own_code(self.plain),
                backend=backend,
                dynamic=False if self._fixed and not self._together else None,
            )
        size = _batch_size(arguments) if self._fixed else 0
        if self.works and size not in self._attempted:
            self._attempted.add(size)
            self._try(*arguments)
        return self._function(*arguments)

    def _try(self, *arguments: Any) -> None:
        try:
            self._attempt(self._function, *arguments)
        except Exception as error:  # whatever a compiler raises
            self._function = self.plain
            warnings.warn(
                f"{self._name} could not be compiled, and runs uncompiled, slower and with "
                f"the same guarantee. {type(error).__name__}: {_summary(error)} (torch "
                "needs a C++ compiler on the CPU, and Triton on a GPU.)",
                stacklevel=3,
            )


def _batch_size(arguments: Sequence[Any]) -> int:
    return next((len(each) for each in arguments if isinstance(each, Tensor) and each.ndim), 0)


def _backend(
    backend: str, *, mode: str | None, joined: bool, pure: bool, rounds: bool
) -> AnyFunction:
    """A backend of `torch.compile` that may first join the operators of a graph that go together.

    On the CPU it should not: sorting once more takes longer there than writing sorted values.
    """
    from torch._dynamo import lookup_backend  # loads the compiler: not to happen on import

    compile_as_usual = lookup_backend(backend)
    settings: dict[str, Any] = {}
    inductor = backend == "inductor"
    if inductor:
        settings["config_patches"] = _options(mode, rounds=rounds)
    elif mode is not None:
        settings["mode"] = mode

    def compile_graph(module: fx.GraphModule, examples: list[Tensor]) -> AnyFunction:
        if pure:
            _refuse_writing(module.graph)
        if joined and join_sorted_norms(module.graph):
            module.recompile()
        if inductor and _has_halves(module):  # whatever the precision: of inputs, or of a layer
            settings["config_patches"] = _options(mode, rounds=True)
        compiled: AnyFunction = compile_as_usual(module, examples, **settings)
        return compiled

    return compile_graph


def _has_halves(module: fx.GraphModule) -> bool:
    """Whether something in a graph, or in one within it, has 16 bits."""
    graphs = [each.graph for each in module.modules() if isinstance(each, fx.GraphModule)]
    values = (node.meta.get("example_value") for graph in graphs for node in graph.nodes)
    halves = (torch.bfloat16, torch.float16)
    return any(isinstance(each, Tensor) and each.dtype in halves for each in values)


def _refuse_writing(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        called = str(getattr(node.target, "__name__", node.target))
        writes = called.endswith("_") and not called.endswith("__")
        if writes or called in _WRITING or "out" in node.kwargs:
            raise PrivacyError(
                f"the model writes to a tensor in place ({called}), of which its bounds may have "
                "been computed already. Compute a new tensor instead, or train uncompiled."
            )


_WRITING = frozenset(
    ("setitem", "iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul")
)


def _options(mode: str | None, *, rounds: bool) -> dict[str, Any]:
    """What torch's compiler should do otherwise than by default.

    By default it leaves out roundings between operators that become one kernel: then the cotangent
    that is measured is not quite the one that is added, and a bound does not hold.

    Its analysis of how to cut work on images into tiles makes the backward pass of a pooling layer
    behind sorted pairs take twice as long (torch 2.11, H200: 1.42 instead of 0.67 ms).
    """
    from torch._inductor import config, list_mode_options

    options = {} if mode is None else dict(list_mode_options(mode))
    if hasattr(config.triton, "coalesce_tiling_analysis"):
        options["triton.coalesce_tiling_analysis"] = False
    if rounds:
        if not hasattr(config, _ROUNDS):
            raise PrivacyError(
                "torch's compiler leaves out roundings to bfloat16, and this version has no option "
                f"({_ROUNDS}) against it. Update torch, or train uncompiled."
            )
        options[_ROUNDS] = True
    return options


_ROUNDS = "emulate_precision_casts"


_NUMBERS = itertools.count()


def _with_own_code(function: AnyFunction) -> AnyFunction:
    """A function that shares no code object with others made by the same line.

    Compiled code is kept for a code object, and only so many versions of it. Under its name and
    line, numbers that differ from one call to the next are remembered, and made variables: so two
    models of a process, whose bounds differ, need two names.
    """
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"only functions can be compiled, not {type(function).__name__}")
    return types.FunctionType(
        function.__code__.replace(co_name=f"{function.__name__}_{next(_NUMBERS)}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


def _summary(error: Exception) -> str:
    return " ".join(str(error).split("\n\n")[0].split())[:200]
