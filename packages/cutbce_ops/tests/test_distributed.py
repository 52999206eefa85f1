"""Two processes of 4 devices each, joined by `jax.distributed`, against one device."""

import os
import pathlib
import socket
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).with_name("process_of_two.py")
TIMEOUT_S = 120


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def test_two_processes_equal_one_device():
    command = [sys.executable, str(SCRIPT), str(free_port())]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [*command, str(number)], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for number in range(2)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert "equal" in output.splitlines(), output
