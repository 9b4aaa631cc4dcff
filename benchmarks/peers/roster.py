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
    """An engine with its weights and options. Its script is `ENGINE_peer.py`, its packages are
    `requirements-ENGINE.txt`."""

    name: str
    label: str  # what its figures were made with
    model: str  # below `Setup.models`
    remove: tuple[str, ...] = ()  # packages to take out again after the installation
    ours: bool = False  # octavo, from the environment that runs the comparison
    flags: tuple[str, ...] = ()  # of octavo; {models} stands for `Setup.models`
    variant_of: str | None = None  # another engine of this list, with other weights
    beside: str = OURS  # the octavo with which it is compared

    @property
    def engine(self) -> str:
        return OURS if self.ours else self.variant_of or self.name

    def python(self, setup: Setup) -> str:
        return sys.executable if self.ours else str((setup.envs / self.engine / "bin" / "python").absolute())

    @property
    def script(self) -> Path:
        return HERE / f"{self.engine}_peer.py"

    def command(self, setup: Setup) -> list[str]:
        """The process that stays loaded; speaks the protocol of `child.py`."""
        options = ["--model", str(setup.models / self.model), "--threads", str(setup.threads), *self._flags(setup)]
        return [self.python(setup), str(self.script), *options]

    def cold_command(self, setup: Setup, prompt: str) -> list[str]:
        """A process that prints the first token after a prompt and ends."""
        if not self.ours:
            return [*self.command(setup), "--cold"]
        options = ["--max-tokens", "1", "--temperature", "0", "--quiet", "--num-threads", str(setup.threads)]
        model = str(setup.models / self.model)
        return [sys.executable, "-m", "octavo", "generate", "--model", model, *options, *self._flags(setup), prompt]

    def _flags(self, setup: Setup) -> list[str]:
        return [flag.format(models=setup.models) for flag in self.flags]

    def environment(self, setup: Setup) -> dict[str, str]:
        """Of its processes: ours, without the network, and what the peer's own manual advises."""
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(setup.threads)}
        if not self.ours:
            env.pop("PYTHONPATH", None)  # which may lead to octavo, and to packages of another environment
        if self.engine == "vllm_cpu":
            cores = sorted(os.sched_getaffinity(0))[: setup.threads]
            libiomp = (setup.envs / self.engine / "lib" / "libiomp5.so").absolute()
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
            return f"no environment {setup.envs.name}/{self.engine}; make it with --install"
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
        requirements = HERE / f"requirements-{self.engine}.txt"
        installed = setup.envs / self.engine / requirements.name  # a copy, written when all went well
        if installed.exists() and installed.read_text() == requirements.read_text():
            return
        subprocess.run([sys.executable, "-m", "venv", setup.envs / self.engine], check=True)
        pip = [self.python(setup), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", "-r", requirements], check=True)
        if self.remove:
            subprocess.run([*pip, "uninstall", "-q", "-y", *self.remove], check=True)
        installed.write_text(requirements.read_text())


BF16, Q8_0, Q4_1 = (f"smollm2-135m-{kind}.gguf" for kind in ("bf16", "q8_0", "q4_1"))
GEMMA = "gemma-3-270m-q4_k_m.gguf"
INT8_KV = ("--kv-cache-dtype", "int8")
ROSTER = {
    peer.name: peer
    for peer in (
        Peer(OURS, "bf16 weights, bf16 KV", BF16, ours=True),
        Peer("octavo_fast_math", "bf16 weights, bf16 KV", BF16, ours=True, flags=("--fast-math",)),
        Peer("octavo_int8", "bf16 made int8, bf16 KV", BF16, ours=True, flags=("--quantization", "int8")),
        Peer(
            "octavo_int8_int8kv", "bf16 made int8, int8 KV", BF16, ours=True, flags=(*INT8_KV, "--quantization", "int8")
        ),
        Peer("octavo_q8_0", "Q8_0 weights, bf16 KV", Q8_0, ours=True),
        Peer("octavo_q4_1", "Q4_1 weights, bf16 KV", Q4_1, ours=True),
        Peer("octavo_q4_1_int8kv", "Q4_1 weights, int8 KV", Q4_1, ours=True, flags=INT8_KV),
        Peer(
            "octavo_q4_1_packed", "Q4_1 weights, mapped", Q4_1, ours=True, flags=("--packed-cache", "{models}/packed")
        ),
        Peer("octavo_gemma3", "Gemma-3-270m Q4_K_M, bf16 KV", GEMMA, ours=True),
        Peer("vllm_cpu", "bf16 weights, bf16 KV", "smollm2-135m-bf16", ("torchvision", "torchaudio", "torchcodec")),
        Peer("llama_cpp", "bf16 weights, f16 KV", BF16),
        Peer("llama_cpp_q8_0", "Q8_0 weights, f16 KV", Q8_0, variant_of="llama_cpp", beside="octavo_q8_0"),
        Peer("llama_cpp_q4_1", "Q4_1 weights, f16 KV", Q4_1, variant_of="llama_cpp", beside="octavo_q4_1"),
        Peer("llama_cpp_gemma3", "Gemma-3-270m Q4_K_M, f16 KV", GEMMA, variant_of="llama_cpp", beside="octavo_gemma3"),
        Peer("transformers", "bf16 weights, bf16 KV", "smollm2-135m-bf16"),
        Peer("openvino", "bf16 weights, bf16 KV", "smollm2-135m-bf16-openvino"),
    )
}
