"""Run a function in several gloo processes on the CPU and bring back what they return."""

import io
import multiprocessing
import multiprocessing.connection
import os
import socket
import sys
import time
import traceback

import torch

from gc_dpr import distributed

# Forked from a server that has imported everything once: a process is there in milliseconds. Plain
# fork would inherit autograd's threads from the test process. An optimizer's first step or DDP
# imports torch._dynamo, which alone takes seconds, and so does the training with transformers.
_context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
if sys.platform == "linux":
    _context.set_forkserver_preload(
        [
            "pytest",
            "torch._dynamo",
            "torch.distributed.fsdp",
            "transformers.models.bert.modeling_bert",
            "gc_dpr.training.trainer",
        ]
    )


class ProcessFailedError(Exception):
    """A process raised: ``errors`` maps its rank to its traceback."""

    def __init__(self, errors):
        self.errors = errors
        super().__init__("\n".join(f"rank {rank}:\n{text}" for rank, text in errors.items()))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_distributed(function, world_size, *args, timeout=60):
    """Call ``function(*args)`` in ``world_size`` processes inside ``process_group("cpu")``.

    The function must be importable (defined at the top of a test file). Returns the list of results
    in rank order; raises ProcessFailedError where one raised, died or took over ``timeout`` s.
    """
    port, processes, pipes = free_port(), [], []
    for rank in range(world_size):
        receiver, sender = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_child, args=(sender, rank, world_size, port, function, args), daemon=True
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        answers = _receive(pipes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
    errors = {rank: answer for rank, (ok, answer) in enumerate(answers) if not ok}
    if errors:
        raise ProcessFailedError(errors)
    return [torch.load(io.BytesIO(answer), weights_only=False) for _, answer in answers]


def _receive(pipes, deadline):
    """One (ok, bytes or text) per process. After a failure the others get two more seconds."""
    answers = [(False, "no answer in time: it hangs, probably in a collective")] * len(pipes)
    waiting = dict(enumerate(pipes))
    while waiting and time.monotonic() < deadline:
        multiprocessing.connection.wait(list(waiting.values()), timeout=0.5)
        for rank, pipe in list(waiting.items()):
            if not pipe.poll():
                continue
            try:
                answers[rank] = pipe.recv()
            except EOFError:
                answers[rank] = (False, "the process died without an answer")
            if not answers[rank][0]:
                deadline = min(deadline, time.monotonic() + 2)
            del waiting[rank]
    return answers


def _child(sender, rank, world_size, port, function, args):
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        with distributed.process_group("cpu"):
            result = function(*args)
        buffer = io.BytesIO()
        torch.save(result, buffer)
        sender.send((True, buffer.getvalue()))
    except BaseException:
        sender.send((False, traceback.format_exc()))
    sender.close()
