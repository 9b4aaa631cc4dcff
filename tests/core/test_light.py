import subprocess
import sys


def test_core_loads_neither_numpy_nor_torch():
    script = (
        "import sys, octavo.core\n"
        "print([name for name in ('numpy', 'torch', 'transformers', 'octavo.llm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
