"""One engine over two processes, and its end when one of them is lost."""

from __future__ import annotations

import json
import socket
import time

from tests.mesh.processes import start
from v41jax.multihost import LOST_EXIT_CODE

PROGRAM = "tests.mesh.serving"
WITHIN_S = 30


def test_two_processes_serve_the_same_tokens_and_notice_a_loss(checkpoint, served):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = (checkpoint, "8", f"127.0.0.1:{port}")
    leader, follower = (start(PROGRAM, *place, process, devices=4) for process in (0, 1))
    try:
        # The CPU's collectives write lines of their own about who is connected.
        line = next((line for line in leader.stdout if line.startswith("{")), "")
        assert line, [process.communicate(timeout=60)[1] for process in (leader, follower)]
        assert json.loads(line)["tokens"] == served["1"]["tokens"][1:2], "one request"
        follower.kill()
        began = time.monotonic()
        _, errors = leader.communicate(timeout=2 * WITHIN_S)
        assert time.monotonic() - began < WITHIN_S
        assert leader.returncode == LOST_EXIT_CODE
        assert "HostLostError: process 1 was lost" in errors
    finally:
        for process in (leader, follower):
            process.kill()
            process.wait()
