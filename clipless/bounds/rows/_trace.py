"""A run of a model in which the batch axis is followed through every operator that it executes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from clipless.bounds.rows._calls import TracedCall, constants_of, numbers_in
from clipless.bounds.rows._escapes import NoEscapes, refuse_rewriting_of_activations
from clipless.bounds.rows._layout import Rows
from clipless.bounds.rows._rule import Layout, RowCall, advised, find_row_rule, place_in_code
from clipless.errors import UnsupportedOperationError


class RowTrace(TorchDispatchMode):
    """Follows the examples of a batch while a model runs on it, or refuses what lets them meet.

    It works on operators as they are executed, below autograd and below whatever Python code called
    them: no `forward` is too dynamic for it. Conversions of an example's values to Python numbers,
    on which a decision could rest, are refused. So is whatever an `earlier` pass has computed from
    its examples, and left somewhere.
    """

    def __init__(self, batch: int, *, earlier: Sequence[RowTrace] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.batch = batch
        self.calls: list[TracedCall] = []
        """The operators that were executed on what depends on examples, in their order."""
        self._earlier = tuple(earlier)
        self._drawn: set[int] = set()
        """The memory of tensors that hold random numbers, and nothing of any example."""
        self.refusal: UnsupportedOperationError | None = None
        """Why the model was refused: operators such as `*` turn errors into others."""
        self._layouts: dict[int, Rows] = {}
        self._carrying: set[int] = set()
        """The memory of tensors that depend on examples."""
        self._kept: list[Tensor] = []  # so that no identity and no memory is used again

    def follow(self, tensors: Iterable[Tensor], rows: Rows = Rows(0)) -> None:  # noqa: B008
        """Say of tensors that their first axis counts examples."""
        for tensor in tensors:
            self._note(tensor, rows)

    def rows(self, tensor: Tensor) -> Layout:
        """Return where the examples are in a tensor; None if it holds nothing of them."""
        known = self._layouts.get(id(tensor))
        if known is None and tensor.numel() and _memory(tensor) in self._carrying:
            raise UnsupportedOperationError(
                "examples were written into a part of another tensor (`x[:, 0] = ...`), which the "
                "trace does not follow. Build the tensor with torch.cat or torch.stack, or write "
                "to a tensor that was computed from the batch."
            )
        return known

    def carries(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on examples, or lies where examples were written."""
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return True  # who knows
        return id(tensor) in self._layouts or bool(
            tensor.numel() and _memory(tensor) in self._carrying
        )

    @property
    def operators(self) -> list[str]:
        """The names of these operators."""
        return [each.name for each in self.calls]

    def refuse(self, error: UnsupportedOperationError) -> None:
        """Note why the model is refused, whatever becomes of the error."""
        self.refusal = self.refusal or error

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Execute an operator, and find out where the examples are in its result."""
        try:
            return self._follow_operator(function, args, kwargs or {})
        except UnsupportedOperationError as error:
            self.refuse(error)
            raise

    def _follow_operator(self, function: Any, args: Any, kwargs: Any) -> Any:
        refuse_rewriting_of_activations()
        name = str(function.overloadpacket)
        call = RowCall(name, args, kwargs, None, self.batch, self.rows)
        self._refuse_earlier(call)
        if all(self.rows(each) is None for each in call.tensors()):
            output = function(*args, **kwargs)
            self._note_drawn(function, call, output)
            return output
        met = constants_of(call, self._is_drawn)  # before it is written to
        output = function(*args, **kwargs)
        call = replace(call, output=output)
        layouts = find_row_rule(function)(call)
        outputs = output if isinstance(output, tuple | list) else (output,)
        found = layouts if isinstance(layouts, tuple | list) else (layouts,) * len(outputs)
        results = []
        for tensor, rows in zip(outputs, found, strict=True):
            if isinstance(tensor, Tensor) and rows is not None:
                self._check(call, tensor, rows)
                self._note(tensor, rows)
                rest = tensor.shape[: rows.axis] + tensor.shape[rows.axis + 1 :]
                results.append((rows, tuple(rest)))
            elif torch.Tag.nondeterministic_seeded in function.tags:
                self._note_drawn(function, call, tensor)
        numbers = (*numbers_in(args), *numbers_in(kwargs.values()))
        self.calls.append(TracedCall(name, place_in_code(), numbers, met, tuple(results)))
        return output

    def _refuse_earlier(self, call: RowCall) -> None:
        for earlier in self._earlier:
            for each in call.tensors():
                if each.numel() and _memory(each) in earlier._carrying:
                    raise advised(
                        f"{call.name}{place_in_code()}: what an earlier batch has left (a state "
                        "that is kept from one call of the model to the next) meets the examples "
                        "of this one, and one example's contribution would depend on those of "
                        "others. Begin each pass without memory of earlier ones"
                    )

    def _is_drawn(self, tensor: Tensor) -> bool:
        return bool(self._drawn and tensor.numel() and _memory(tensor) in self._drawn)

    def _note_drawn(self, function: Any, call: RowCall, output: Any) -> None:
        """Note tensors of random numbers, and what is computed from them."""
        random = torch.Tag.nondeterministic_seeded in function.tags
        if random or any(map(self._is_drawn, call.tensors())):
            for each in output if isinstance(output, tuple | list) else (output,):
                if isinstance(each, Tensor) and each.numel() and each.device.type != "meta":
                    self._kept.append(each)
                    self._drawn.add(_memory(each))

    def _check(self, call: RowCall, tensor: Tensor, rows: Rows) -> None:
        if tensor.shape[rows.axis] != rows.outer * self.batch * rows.inner:
            call.refuse("its result does not have all examples on one axis")
        known = self._layouts.get(id(tensor))
        if known is None and any(tensor is each for each in call.args):
            whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
            if not whole:
                call.refuse("it writes examples into a part of another tensor")
        elif known is not None and known != rows:
            call.refuse("it writes examples to where others are")

    def _note(self, tensor: Tensor, rows: Rows) -> None:
        self._layouts[id(tensor)] = rows
        self._kept.append(tensor)
        if tensor.numel():
            self._carrying.add(_memory(tensor))


def trace_rows(run: Callable[[], Any], inputs: Iterable[Tensor], trace: RowTrace) -> RowTrace:
    """Run a model on a batch, and return the trace, or refuse what lets examples meet.

    No autograd function of the user's own may stand on the way back from its results.
    """
    trace.follow(inputs)
    try:
        with torch.enable_grad(), NoEscapes(trace.carries, trace.refuse), trace:
            output = run()
    except Exception as error:
        if trace.refusal is None or trace.refusal is error:
            raise
        raise trace.refusal from error
    if trace.refusal is not None:  # which the model's own `except` has caught
        raise trace.refusal
    refuse_own_gradients(tensors_in(output))
    return trace


def refuse_own_gradients(outputs: Iterable[Tensor]) -> None:
    """Refuse custom backward passes, of which a trace of the forward pass says nothing."""
    waiting: list[Any] = [each.grad_fn for each in outputs]
    known: set[Any] = {None}
    while waiting:
        node = waiting.pop()
        if node in known:
            continue
        known.add(node)
        own = isinstance(node, torch.autograd.function.BackwardCFunction)
        kind = getattr(type(node), "_forward_cls", type(node))
        module = str(kind.__module__)
        if own and "checkpoint" in module:
            raise UnsupportedOperationError(
                "gradient checkpointing with use_reentrant=True runs parts of the model again "
                "inside of the backward pass, where their layers have no thresholds. Use "
                "use_reentrant=False, or no checkpointing."
            )
        if own and not module.startswith(("clipless.", "torch.")):
            raise UnsupportedOperationError(
                f"{kind.__name__} ({module}) is an autograd function with a backward pass of "
                "its own, of which nothing is known: it could mix examples. Write the operation "
                "with torch's own functions."
            )
        waiting += [each for each, _ in node.next_functions]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors of a nested output: tuples, lists, mappings and dataclasses of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)


def _memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():  # `NoEscapes` is for the model's own code
        return tensor.untyped_storage().data_ptr()
