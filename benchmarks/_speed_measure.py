"""How a step of the speed benchmark is timed and weighed."""

import gc
import math
import subprocess
import sys
import time
from pathlib import Path

import torch
from _speed_methods import Images, Step, make_step

BENCHMARK = Path(__file__).parent / "speed.py"


def prepared(method: str, mode: str, model: str, batch: int, images: Images, *, weighed: bool):
    """Build a step and warm it up; return it with its peak memory in GiB."""
    device = images.device
    if device.type == "cpu":
        step = make_step(method, mode, model, batch, images)
        repeat(step, 2, device)
        return step, weight_on_the_cpu(method, mode, model, batch) if weighed else None
    empty(device)
    before = torch.cuda.memory_allocated()
    step = make_step(method, mode, model, batch, images)
    empty(device)
    torch.cuda.reset_peak_memory_stats()
    repeat(step, 5, device)
    if not getattr(step, "graphs", lambda: False)():
        empty(device)
        torch.cuda.reset_peak_memory_stats()
        repeat(step, 2, device)
    # What happens inside a graph is seen by the allocator once, when it is recorded.
    return step, round((torch.cuda.max_memory_allocated() - before) / 2**30, 4)


def in_turns(steps: dict, device: torch.device, rounds: int) -> dict:
    """Time the steps, a few of each kind at a time, one kind after the other."""
    once = {key: max(repeat(step, 1, device), 1e-5) for key, step in steps.items()}
    times = {key: [] for key in steps}
    for _ in range(rounds):
        for key, step in steps.items():
            count = max(1, min(50, math.ceil(0.2 / once[key])))
            times[key].append(repeat(step, count, device) / count)
    return times


def repeat(step: Step, count: int, device: torch.device) -> float:
    """Take some steps and return the seconds until the device has finished them."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    synchronize(device)
    return time.perf_counter() - start


def largest_batch(method: str, model: str, device: torch.device) -> dict:
    """Double the batch until it no longer fits."""
    fits, batch = 0, 8192
    while True:
        try:
            empty(device)
            images = Images(2 * batch, device, repeated=True)
            repeat(make_step(method, "eager", model, batch, images), 2, device)
        except RuntimeError as error:  # out of memory, or sizes that a kernel cannot index
            reason = str(error).strip().splitlines()[0][:100]
            break
        fits, batch = batch, 2 * batch
    return {"method": method, "model": model, "largest_batch": fits, "then": reason}


def weight_on_the_cpu(method: str, mode: str, model: str, batch: int) -> float | None:
    """The growth of a process that does nothing else."""
    command = [sys.executable, str(BENCHMARK), "--device", "cpu", "--memory-of"]
    command += [method, mode, model, str(batch)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    return round(float(run.stdout.split()[-1]), 4) if run.returncode == 0 else None


def growth(method: str, mode: str, model: str, batch: str, device: torch.device) -> float:
    """By how many GiB the process grows during steps, beyond what stands before them."""
    images = Images(max(2 * int(batch), 4096), device)
    step = make_step(method, mode, model, int(batch), images)
    if mode != "eager":
        step()  # compilers need memory of their own
    Path("/proc/self/clear_refs").write_text("5")
    before = _kibibytes("VmRSS")
    step()
    step()
    return (_kibibytes("VmHWM") - before) / 2**20


def _kibibytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def empty(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
