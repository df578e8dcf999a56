"""The probe by which OpenEnv's capture grades a server: openenv_probe.py URL"""

import sys

from openenv.core.harness.capture.validate_llm import validate_llm

report = validate_llm(sys.argv[1], "policy")
print(report)
assert report.ok
assert (report.capture_level, report.logprobs_mode, report.param_fixes) == ("tokens", "processed", [])
