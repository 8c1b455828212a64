"""The sensitivity of a small convolutional network, and what certifies it."""

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import clipless
from clipless import losses
from clipless import nn as lip


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        lip.BoundedInput(norm=20.0),
        lip.SpectralConv2d(1, 32, 3, padding="same"),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        lip.SpectralConv2d(32, 64, 3, padding="same", bias=True, bias_norm=0.1),
        lip.GroupSort(2),
        lip.ScaledL2NormPool2d(2),
        torch.nn.Flatten(),
        lip.SpectralLinear(64 * 7 * 7, 128),
        lip.GroupSort(2),
        lip.SpectralLinear(128, 10),
    )
    report = clipless.sensitivity(
        model, loss=losses.CrossEntropy(tau=18.0), input_shape=(1, 28, 28)
    )
    console = Console()
    console.print(report)

    certificates = Table(
        title="Certificates: proved norms of the weights",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("parameter", "proved at most", "constraint", "proof"):
        certificates.add_column(heading)
    for name, certificate in clipless.certify(model).items():
        certificates.add_row(
            name, f"{certificate.bound:.7f}", f"{certificate.radius:g}", certificate.method
        )
    console.print(certificates)


if __name__ == "__main__":
    main()
