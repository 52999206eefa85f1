import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_evaluation_on_a_mesh_equals_that_on_one_device(tmp_path):
    script = Path(__file__).parent / "sharded_runs.py"
    devices = "--xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, many = json.loads(done.stdout).values()
    assert one["model"]["mrr"] > 0
    assert one["model"]["coverage@8"] > 0
    # A rank or two may flip where scores differ in their last digit.
    assert many["model"] == pytest.approx(one["model"], abs=0.02)
    assert many["popularity"] == one["popularity"]
    assert many["strata"] == one["strata"]
