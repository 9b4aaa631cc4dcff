"""The thread pool's own test in C++ (csrc/tests/pool_test.cpp), compiled plainly; `make sanitize` has it under TSan."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_pool(tmp_path: Path) -> None:
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++")
    assert compiler, "the native runtime was built with a C++ compiler: name it in CXX"
    sources = [str(ROOT / "csrc" / name) for name in ("pool.cpp", "tests/pool_test.cpp")]
    program = str(tmp_path / "pool_test")
    flags = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}", "-pthread"]
    subprocess.run([compiler, *flags, *sources, "-o", program], check=True)
    result = subprocess.run([program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "pool_test: ok\n"
