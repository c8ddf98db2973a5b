"""Experiments carried out: one in this process, or several side by side in forks of a warm one."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from kit import forkserver
from lab import quiet
from lab.notebook import Lab, NotHere, Page, Text

# What experiments import, some of it late; a fork has it already, as far as it is installed.
_WARM = {"lab.draw", "torch.distributed.fsdp"}
_WARM |= {f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "vit")}


@dataclass(frozen=True)
class Job:
    """One experiment to carry out: `run` fills the page, and a fork can import it."""

    run: Callable[[Lab], None]
    page: Page
    folder: Path
    device: torch.device
    quick: bool


@dataclass(frozen=True)
class Ended:
    """What has come of it: the page, how it ended in a few words, and where it broke off."""

    page: Page
    how: str
    where: str = ""


def carry_out(job: Job) -> Ended:
    """Run one experiment here; only Ctrl-C comes through."""
    start, page = time.perf_counter(), job.page
    lab = Lab(page, job.folder, job.device, quick=job.quick)
    try:
        with _one_thread(job.device):
            job.run(lab)
    except NotHere as reason:
        lab.say(f"Not measured here: {reason}.")
        return Ended(page, f"not measured here: {reason}")
    except Exception as error:
        return _broken(page, f"{type(error).__name__}: {error}", traceback.format_exc())
    return Ended(page, f"{time.perf_counter() - start:.0f} s")


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """On the cpu: steps of this size only wait for a second thread."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def carry_out_all(
    jobs: Sequence[Job], at_once: int, tell: Callable[[list[Page]], None]
) -> Iterator[Ended]:
    """Each as it ends; `tell` hears which ones are under way.

    With more than one at once each has a process of its own, and a timing has the machine to itself
    (lab.quiet). All of them end with the iteration.
    """
    if at_once == 1 or len(jobs) == 1:
        for job in jobs:
            tell([job.page])
            yield carry_out(job)
        return
    folder, waiting, running = forkserver.start(), [*jobs], dict[Connection, _Running]()
    forkserver.wait_until_warm()
    forkserver.preload(_WARM | {job.run.__module__ for job in jobs})
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                job = waiting.pop(0)
                here, there = forkserver.pipe()
                log = folder / f"lab-{job.page.name}"
                process = forkserver.fork(
                    _in_a_fork, job, str(folder), there, log=log, has_forks=True
                )
                there.close()
                running[here] = _Running(job.page, process, log)
            tell([one.page for one in running.values()])
            for pipe in connection.wait([*running]):
                assert isinstance(pipe, Connection)
                yield _end(pipe, running.pop(pipe))
    finally:
        for one in running.values():
            forkserver.end(one.process)


@dataclass(frozen=True)
class _Running:
    page: Page
    process: BaseProcess
    log: Path


def _in_a_fork(job: Job, folder: str, pipe: Connection) -> None:
    with quiet.side_by_side(Path(folder)):
        ended = carry_out(job)
    pipe.send(ended)


def _end(pipe: Connection, one: _Running) -> Ended:
    try:
        ended: Ended = pipe.recv()
    except EOFError:
        one.process.join()
        how = f"its process ended with {forkserver.ending(one.process.exitcode or 0)}"
        ended = _broken(one.page, how, forkserver.read(one.log))
    forkserver.end(one.process)
    pipe.close()
    return ended


def _broken(page: Page, why: str, where: str) -> Ended:
    page.is_whole = False
    page.blocks.append(Text(f"Broke off: {why}."))
    return Ended(page, f"broke off: {why}", where)
