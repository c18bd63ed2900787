"""Seeds that depend on what they are for, and saving the state of every random generator.

A draw that must not change with the number of workers or processes, or after a resume, gets its own
seed from what identifies it: ``derive_seed(run_seed, epoch, example_id)``. What torch draws on its
own (dropout) follows the global generators; their state goes into a checkpoint as tensors and plain
numbers, so that it loads with ``torch.load(..., weights_only=True)``.
"""

from __future__ import annotations

import hashlib
import logging
import random
from typing import Any

import numpy as np
import torch

logger = logging.getLogger(__name__)


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is a pure function of ``parts``.

    Every part enters the hash with its type and length, so ``("a", "bc")`` and ``("ab", "c")``, or
    ``1`` and ``"1"``, are different. Python's ``hash`` would not do: it is salted per process.

    Args:
        *parts: What the draw is for, from general to particular, e.g. seed, epoch, example id.

    Returns:
        An integer in [0, 2**63), the same on every platform and Python version.

    Raises:
        TypeError: A part is neither an int nor a str.

    Example:
        >>> derive_seed(42, 0, "q17") == derive_seed(42, 0, "q17")
        True
        >>> derive_seed(42, 0, "q17") == derive_seed(42, 1, "q17")
        False
        >>> derive_seed(1, "2") == derive_seed("1", 2)
        False
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"derive_seed takes int and str, found {type(part).__name__}: {part!r}")
        tag = "i" if isinstance(part, int) else "s"
        data = str(part).encode("utf-8", errors="surrogatepass")
        digest.update(f"{tag}{len(data)}:".encode("ascii"))
        digest.update(data)
    return int.from_bytes(digest.digest(), "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed the global generators of python, numpy and torch (all its devices).

    Args:
        seed: Any integer; numpy's generator, which takes 32 bits, gets its lowest 32.
    """
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - other people's modules draw from this one
    torch.manual_seed(seed)  # seeds cuda and mps as well


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators as tensors and plain numbers.

    Of the accelerators, the current device's generator is taken: a process trains on one device,
    and asking for the others would open a context on each of them.

    Returns:
        ``{"python": ..., "numpy": ..., "torch": ...}`` plus ``"cuda"`` or ``"mps"`` where present.
        The value for :func:`restore_rng_state`; loads with ``weights_only=True``.
    """
    version, words, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)  # noqa: NPY002 - see seed_everything
    state: dict[str, Any] = {
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
        "numpy": {
            "words": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
            "position": int(numpy_state["state"]["pos"]),
            "has_gauss": int(numpy_state["has_gauss"]),
            "gauss": float(numpy_state["gauss"]),
        },
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_rng_state(state: dict[str, Any]) -> None:
    """Put the global generators back to a state taken by :func:`rng_state`.

    A state of an accelerator that this machine lacks cannot be restored; that is logged as a
    warning, since a run that continues on another kind of device draws other dropout masks.

    Args:
        state: What :func:`rng_state` returned, possibly saved and loaded in between.

    Example:
        >>> state = rng_state()
        >>> first = torch.rand(3)
        >>> restore_rng_state(state)
        >>> bool((torch.rand(3) == first).all())
        True
    """
    python, numpy_state = state["python"], state["numpy"]
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))
    np.random.set_state(  # noqa: NPY002 - see seed_everything
        (
            "MT19937",
            numpy_state["words"].cpu().numpy().astype(np.uint32),
            numpy_state["position"],
            numpy_state["has_gauss"],
            numpy_state["gauss"],
        )
    )
    torch.set_rng_state(state["torch"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"].cpu())
    elif "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"].cpu())
    elif "cuda" in state or "mps" in state:
        logger.warning(
            "the saved random state is of %s, which is not available here: "
            "dropout masks will differ from the run that saved it",
            "cuda" if "cuda" in state else "mps",
        )
