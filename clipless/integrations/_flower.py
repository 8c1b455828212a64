"""Flower: clients and server of `clipless.federated`, joined by its apps and its transport."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from clipless.errors import PrivacyError
from clipless.federated import FederatedClient, FederatedServer, RoundResult, RoundTask

_WEIGHTS, _TASK, _UPDATE = "clipless.weights", "clipless.task", "clipless.update"
_WAIT = 0.5


def _flower() -> Any:
    """Return Flower's records and messages."""
    try:
        from flwr import app
    except ModuleNotFoundError as error:
        raise ImportError("this needs Flower: pip install 'clipless[flower]'") from error
    return app


def flower_client_app(make_client: Callable[[Any], FederatedClient]) -> Any:
    """Return a `ClientApp` whose training answers the rounds of `train_with_flower`.

    `make_client` is called with Flower's `Context` in every round, for a Flower client begins anew
    each time: give it a file for its ledger, so that it knows what it has answered.
    """
    flower = _flower()
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def train(message: Any, context: Any) -> Any:
        client = make_client(context)
        try:
            steps = client.answer(_read_task(message.content))
        finally:
            client.ledger.close()
        record = flower.ArrayRecord.from_numpy_ndarrays([steps.numpy()])
        content = flower.RecordDict({_UPDATE: record})
        return flower.Message(content=content, reply_to=message)

    app.train()(train)
    return app


def train_with_flower(
    server: FederatedServer, grid: Any, *, rounds: int | None = None, timeout: float = 600.0
) -> list[RoundResult]:
    """Take rounds with the nodes of a Flower `Grid`, by default all that are left; return them.

    For the main function of a `ServerApp`. A round begins when as many nodes are there as the terms
    have clients, or after `timeout` seconds with those that are; whoever does not answer within
    `timeout`, or with an error, counts as absent.

    Raises:
        PrivacyError: if more nodes are there than the terms have clients, or too few shares come.
    """
    flower = _flower()
    left = server.terms.rounds - server.number
    results = []
    for _ in range(left if rounds is None else rounds):
        nodes = _nodes(grid, server.terms.clients, timeout)
        task = server.begin_round()
        messages = [
            flower.Message(
                content=_write_task(task), dst_node_id=node, message_type=flower.MessageType.TRAIN,
                group_id=str(task.number),
            )
            for node in server.chosen(nodes)
        ]  # fmt: skip
        replies = grid.send_and_receive(messages, timeout=timeout) if messages else []
        answers = {}
        for reply in replies:
            if not reply.has_error() and _UPDATE in reply.content:
                arrays = reply.content[_UPDATE].to_numpy_ndarrays()
                if len(arrays) == 1:
                    answers[reply.metadata.src_node_id] = torch.from_numpy(arrays[0].copy())
        results.append(server.finish_round(answers))
    return results


def _nodes(grid: Any, wanted: int, timeout: float) -> list[int]:
    """Wait for nodes, in an order that does not depend on when they came."""
    until = time.monotonic() + timeout
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= wanted or time.monotonic() >= until:
            return nodes
        time.sleep(_WAIT)


def _write_task(task: RoundTask) -> Any:
    flower = _flower()
    arrays = flower.ArrayRecord.from_numpy_ndarrays(
        [each.numpy() for each in task.weights.values()]
    )
    about = flower.ConfigRecord(
        {"number": task.number, "terms": task.terms, "names": list(task.weights)}
    )
    return flower.RecordDict({_WEIGHTS: arrays, _TASK: about})


def _read_task(content: Any) -> RoundTask:
    if _WEIGHTS not in content or _TASK not in content:
        raise PrivacyError(
            "this message is no round of clipless: the server's app must call train_with_flower"
        )
    about = content[_TASK]
    arrays = [torch.from_numpy(each.copy()) for each in content[_WEIGHTS].to_numpy_ndarrays()]
    return RoundTask(
        number=int(about["number"]),
        terms=str(about["terms"]),
        weights=dict(zip(about["names"], arrays, strict=True)),
    )
