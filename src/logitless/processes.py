"""Runs one command in a process group that ends with it, and with us, however we end. Linux only.

What a command leaves running, and the command itself when we are interrupted, gets SIGTERM, time to end, then SIGKILL.
If we are killed, the kernel kills the command (PR_SET_PDEATHSIG) and a shell, which waits for us to close a pipe, the
rest of its group. A process that left the group is not followed.
"""

import ctypes
import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
POLL_S = 0.02
KILLED_S = 30.0  # how long a killed process may need to give back what it holds: a GPU's memory can take seconds
PARENT = "LOGITLESS_PARENT"  # the variable in which a process leaves its number to those that it starts
STOPS = {signal.SIGINT, signal.SIGTERM}


def run(command: list[str], output: Path, grace_s: float, cwd: str | None = None) -> int:
    """Runs `command` with stdout and stderr in the file `output`; no process of its group outlives the call.

    Args:
        command: the program and its arguments.
        output: a file, which is overwritten.
        grace_s: seconds between SIGTERM and SIGKILL.
        cwd: the folder to run it in; None for ours.

    Returns:
        The exit status, negative if a signal killed the command.
    """
    process = guard = None
    libc = ctypes.CDLL(None, use_errno=True)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)  # an interrupt waits until there is something to end
    try:
        with open(output, "wb") as stream:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=cwd,
                preexec_fn=partial(_die_with, libc, os.getpid(), blocked),
            )
        wait_and_kill = ["/bin/sh", "-c", 'read _; kill -s KILL -- "-$0"', str(process.pid)]
        guard = subprocess.Popen(
            wait_and_kill, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
        )
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        try:
            if process is not None:
                _end(process, grace_s)
        finally:
            if guard is not None:
                guard.kill()
                guard.communicate()


def group_members(group: int) -> list[int]:
    """The processes of a group that still run; one that ended and was not waited for is none."""
    members = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own_group, *_ = _stat(file.parent.name)
        except (OSError, ValueError):  # it has just ended
            continue
        if int(own_group) == group and state not in "ZX":
            members.append(int(file.parent.name))
    return members


def is_stopped(process: int) -> bool:
    """Whether somebody has stopped the process, by SIGSTOP or in a debugger."""
    try:
        return _stat(process)[0] in "Tt"
    except OSError:  # it has ended
        return False


def age_s() -> float:
    """Seconds since this process was started, before Python's first line."""
    start_ticks = _stat("self")[19]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(start_ticks) / os.sysconf("SC_CLK_TCK")


def _stat(process: int | str) -> list[str]:
    """What stands in /proc/PROCESS/stat after the name: state, parent, group, ..."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()


def die_with_parent() -> None:
    """Makes the kernel kill this process when the one that started it ends; ends it now if that one has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        os._exit(1)


def _die_with(libc: ctypes.CDLL, parent: int, signals: set) -> None:
    """In the child, before its program starts."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(1)
    signal.pthread_sigmask(signal.SIG_SETMASK, signals)


def _end(process: subprocess.Popen, grace_s: float) -> None:
    try:
        if group_members(process.pid):
            _signal_group(process.pid, signal.SIGTERM)
            _wait(process, grace_s)
    finally:
        if group_members(process.pid):
            _signal_group(process.pid, signal.SIGKILL)
            _wait(process, KILLED_S)
        process.poll()


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError):  # ended meanwhile
        os.killpg(group, number)


def _wait(process: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while group_members(process.pid) and time.monotonic() < deadline:
        process.poll()
        time.sleep(POLL_S)
