"""What HTTP costs: runs http_server.py, which says more.

A script's folder comes first where Python looks for modules, so this file hides the standard
library's `http` from every script beside it. It gives them that in its place.
"""

import runpy
import sys
import sysconfig
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("http_server.py")), run_name="__main__")
else:
    spec = PathFinder.find_spec("http", [sysconfig.get_path("stdlib")])
    assert spec is not None
    assert spec.loader is not None
    sys.modules[__name__] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[__name__])
