"""Run by ``make test-all`` in each extra lane's own interpreter; elsewhere nothing here is collected."""

import importlib.util
import sys
from pathlib import Path

LANE_TESTS = Path(__file__).resolve().parent.parent / "lane"
if str(LANE_TESTS) not in sys.path:
    sys.path.insert(0, str(LANE_TESTS))

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    from ascend_fixtures import ascend, site  # noqa: F401 - fixtures
