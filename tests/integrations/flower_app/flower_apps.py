"""A server and clients for Flower: linear regression, on rows that never leave their client."""

import json
from pathlib import Path

import torch
from flwr.serverapp import ServerApp

from clipless.federated import FederatedClient, FederatedServer, FederatedTerms
from clipless.integrations import flower_client_app, train_with_flower

CLIENTS, ROUNDS = 3, 2


def terms(context):
    central = context.run_config["noise"] == "central"
    return FederatedTerms(
        clients=CLIENTS, rounds=ROUNDS, bound=1.0, noise_multiplier=0.05, delta=1e-3,
        noise="central" if central else "shares", dropouts=0 if central else 1,
    )  # fmt: skip


def model():
    torch.manual_seed(0)
    return torch.nn.Linear(5, 1)


def make_client(context):
    number = int(context.node_config["partition-id"])
    folder = Path(context.run_config["folder"])
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(50, 5, generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0], [1.0]]) + 0.3

    def train(module, round_number):
        if (number, round_number) == (2, 2):
            raise RuntimeError("this client fails: it counts as absent")
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(20):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(module(x), y).backward()
            optimizer.step()

    ledger = folder / f"client-{number}.jsonl"
    return FederatedClient(model(), train, terms(context), ledger=ledger)


client = flower_client_app(make_client)
server = ServerApp()


@server.main()
def main(grid, context):
    folder = Path(context.run_config["folder"])
    own = FederatedServer(model(), terms(context), ledger=folder / "server.jsonl")
    results = train_with_flower(own, grid, timeout=60.0)
    found = {
        "cost": own.cost.to_dict(),
        "summed": [len(each.summed) for each in results],
        "weight": next(own.model.parameters()).detach().flatten().tolist(),
    }
    (folder / "result.json").write_text(json.dumps(found))
