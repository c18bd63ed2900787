"""How much memory a piece of work takes beyond what the process held before it.

On CUDA the allocator counts. On Linux the kernel does: the high-water mark of the resident memory
(VmHWM) is reset before the work. On macOS the mark cannot be reset, so that the figure is too low
where loading took more than the work.

Measure in a fresh process, started with MEASURING_ENVIRONMENT: memory that the C library kept
from earlier work would hide what the work needs. extra_peak_in_subprocess does that.
"""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import torch

from gc_dpr.errors import GcDprError

# One heap, and every block from 256 KiB on mapped for itself and given back when freed.
MEASURING_ENVIRONMENT: Final = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": str(256 << 10)}


def extra_peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """Do the work and return its peak memory minus the memory held before, in bytes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    if sys.platform != "linux":
        before = _largest_ever()
        work()
        return _largest_ever() - before
    _give_free_memory_back()
    before = _status_bytes("VmRSS")
    _reset_high_water_mark()
    work()
    return _status_bytes("VmHWM") - before


def extra_peak_in_subprocess(script: str | Path, arguments: Sequence[str], *, of: str) -> int:
    """Run a script that prints its extra peak bytes as its last word, and return them.

    Args:
        script: The Python file.
        arguments: Its command line.
        of: What it measures, for the messages.

    Raises:
        GcDprError: The script failed.
    """
    print(f"memory of {of} ...", file=sys.stderr, flush=True)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **MEASURING_ENVIRONMENT},
    )
    if done.returncode != 0:
        raise GcDprError(f"the subprocess that measures {of} ended with {done.returncode}")
    return int(done.stdout.split()[-1])


def _give_free_memory_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _reset_high_water_mark() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        print(f"the mark cannot be reset ({error}): an upper bound follows", file=sys.stderr)


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {name}")


def _largest_ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
